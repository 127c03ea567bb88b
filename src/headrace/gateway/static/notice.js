// What went wrong, in plain words, with a button that waits as long as the server asked.

import { button, make } from "./dom.js";

export function notice(problem, again) {
  const said = make("div", {}, make("strong", {}, problem.words));
  if (problem.message && problem.message !== problem.words) said.append(" ", problem.message);
  const box = make("div", { class: "notice", role: "alert" }, said);
  if (again) box.append(againButton(problem.retryAfterS, again, box));
  return box;
}

function againButton(retryAfterS, again, box) {
  const it = button("Try again", () => {
    box.remove();
    again();
  });
  const until = performance.now() + 1000 * (retryAfterS ?? 0);
  const count = () => {
    const leftS = Math.ceil((until - performance.now()) / 1000);
    it.disabled = leftS > 0;
    it.textContent = leftS > 0 ? `Try again in ${duration(leftS)}` : "Try again";
    if (leftS > 0) setTimeout(() => box.isConnected && count(), 250);
  };
  count();
  return it;
}

function duration(seconds) {
  if (seconds < 90) return `${seconds} s`;
  return seconds < 5400 ? `${Math.ceil(seconds / 60)} min` : `${Math.ceil(seconds / 3600)} h`;
}
