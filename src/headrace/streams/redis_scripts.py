"""What the journal has Redis do by itself, in Lua: each script is one step that nobody can come between.

Keys, behind the prefix: `m:` a stream's hash (own, birth, ended), `r:` its records (a Redis stream; an entry's id is the
record's number), `t:` a mark that it was here, `o:` the open streams of an owner, `g` all owners, `l:` a gateway's lease,
`c:` what others say to an owner.
An owner is `gateway:life`; `own` is `gateway:life:epoch`. The keys are made here, so this is not for a Redis Cluster.
"""

import struct

# ARGV: prefix, owner, window_s, open_s, mark_s, entries. An entry is ENTRY (key, number, epoch, three lengths), and then
# the sealed record, the sealed birth or nothing, and the time of the end or nothing: Redis' msgpack knows no bytes.
# Returns the places of those that are another's, and of those that are not kept any more. May run twice: a birth or a
# record that is there already is not written again. A record that would leave a gap is not written, and the stream is
# forgotten, since its rest is nowhere: Redis may have lost what it had said it took.
ENTRY = struct.Struct(">32s5I")
APPEND = """
local prefix, owner = ARGV[1], ARGV[2]
local window_s, open_s, mark_s = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local refused, lost = {}, {}
local owned = prefix .. 'o:' .. owner

local function keep(place, key, number, epoch, sealed, birth, ended)
  local meta, records, mark = prefix .. 'm:' .. key, prefix .. 'r:' .. key, prefix .. 't:' .. key
  local mine = owner .. ':' .. string.format('%d', epoch)
  local own = redis.call('HGET', meta, 'own')
  if birth ~= '' then
    local is_there = own and redis.call('HGET', meta, 'birth') == birth
    if own and own ~= mine then
      -- It was ours and was taken, or another's has this name.
      table.insert(is_there and refused or lost, place)
      return
    end
    if not is_there then
      redis.call('DEL', meta, records)
      redis.call('HSET', meta, 'own', mine, 'birth', birth)
      redis.call('SADD', owned, key)
      redis.call('SADD', prefix .. 'g', owner)
    end
  elseif own ~= mine then
    table.insert(own and refused or lost, place)
    return
  end
  local length = redis.call('XLEN', records)
  if number > length + 1 then
    redis.call('DEL', meta, records)
    redis.call('SREM', owned, key)
    table.insert(lost, place)
    return
  elseif number == length + 1 then
    redis.call('XADD', records, string.format('%d-0', number), 'd', sealed)
  end
  if ended ~= '' then
    redis.call('HSET', meta, 'ended', ended)
    redis.call('EXPIRE', meta, window_s)
    redis.call('EXPIRE', records, window_s)
    redis.call('SET', mark, '', 'EX', window_s + mark_s)
    redis.call('SREM', owned, key)
  elseif birth ~= '' or number % 64 == 0 then
    redis.call('EXPIRE', meta, open_s)
    redis.call('EXPIRE', records, open_s)
    redis.call('SET', mark, '', 'EX', open_s + mark_s)
  end
end

local entries, at, place = ARGV[6], 1, 0
while at <= #entries do
  local key, number, epoch, record_bytes, birth_bytes, ended_bytes
  key, number, epoch, record_bytes, birth_bytes, ended_bytes, at = struct.unpack('>c32I4I4I4I4I4', entries, at)
  local sealed = string.sub(entries, at, at + record_bytes - 1)
  local birth = string.sub(entries, at + record_bytes, at + record_bytes + birth_bytes - 1)
  at = at + record_bytes + birth_bytes + ended_bytes
  local ended = string.sub(entries, at - ended_bytes, at - 1)
  place = place + 1
  local is_done, failed = pcall(keep, place, key, number, epoch, sealed, birth, ended)
  if not is_done then
    local why = type(failed) == 'table' and failed.err or tostring(failed)
    -- Somebody else's key has this name: that is no reason to leave the others.
    if not string.find(why, 'WRONGTYPE') then return redis.error_reply(why) end
    table.insert(lost, place)
  end
end
return {refused, lost}
"""

# ARGV: prefix, keys. Of each whether there is a mark of it and, if it is there: own, birth, the time of the end or nothing,
# and its records, each behind RECORD (number, length). As one string: a client takes long to read very many small ones.
RECORD = struct.Struct(">2I")
READ = """
local prefix, found = ARGV[1], {}
for place = 2, #ARGV do
  local key = ARGV[place]
  local meta = redis.pcall('HMGET', prefix .. 'm:' .. key, 'own', 'birth', 'ended')
  local entries = redis.pcall('XRANGE', prefix .. 'r:' .. key, '-', '+')
  local one = {redis.call('EXISTS', prefix .. 't:' .. key)}
  if meta[1] and meta[2] and entries[1] then
    local records = {}
    for number, entry in ipairs(entries) do
      local sealed = entry[2][2]
      records[number] = struct.pack('>I4I4', string.match(entry[1], '^%d+'), #sealed) .. sealed
    end
    one = {one[1], meta[1], meta[2], meta[3] or '', table.concat(records)}
  end
  found[#found + 1] = one
end
return found
"""

# ARGV: prefix, owner, key, epoch or '' for any, the owner in whose set the key was found or ''.
# Returns the new epoch; 0: another's, ended, or not there.
CLAIM = """
local prefix, owner, key = ARGV[1], ARGV[2], ARGV[3]
local found = redis.pcall('HMGET', prefix .. 'm:' .. key, 'own', 'ended')
local own, ended = found[1], found[2]
if found.err or not own or ended then
  redis.call('SREM', prefix .. 'o:' .. ARGV[5], key)
  return 0
end
local gateway, life, epoch = string.match(own, '^(.*):(%x+):(%d+)$')
if not epoch then return 0 end
local other = gateway .. ':' .. life
if ARGV[4] ~= '' and epoch ~= ARGV[4] then return 0 end
if other == owner then return tonumber(epoch) end
if redis.call('GET', prefix .. 'l:' .. gateway) == life then return 0 end
epoch = tonumber(epoch) + 1
redis.call('HSET', prefix .. 'm:' .. key, 'own', owner .. ':' .. string.format('%d', epoch))
redis.call('SREM', prefix .. 'o:' .. other, key)
redis.call('SADD', prefix .. 'o:' .. owner, key)
redis.call('SADD', prefix .. 'g', owner)
return epoch
"""

# ARGV: prefix, gateway, life, lease_ms, '1' to take the name from an earlier life. Returns whether the lease is ours.
RENEW = """
local lease = ARGV[1] .. 'l:' .. ARGV[2]
local life = redis.call('GET', lease)
if life and life ~= ARGV[3] and ARGV[5] ~= '1' then return 0 end
redis.call('SET', lease, ARGV[3], 'PX', ARGV[4])
redis.call('EXPIRE', ARGV[1] .. 'g', 86400)
redis.call('EXPIRE', ARGV[1] .. 'o:' .. ARGV[2] .. ':' .. ARGV[3], 86400)
return 1
"""

# ARGV: prefix, gateway, life.
RELEASE = """
local lease = ARGV[1] .. 'l:' .. ARGV[2]
if redis.call('GET', lease) == ARGV[3] then redis.call('DEL', lease) end
return 1
"""

# ARGV: prefix, owner, keys. Forgets streams of this owner: those of which something was not kept, which would have no end
# there, and whoever read them would wait for it; and those that are too many.
LET_GO = """
local prefix, owner = ARGV[1], ARGV[2]
for place = 3, #ARGV do
  local meta = prefix .. 'm:' .. ARGV[place]
  local own = redis.call('HGET', meta, 'own')
  if own and string.match(own, '^(.*):%d+$') == owner then
    redis.call('DEL', meta, prefix .. 'r:' .. ARGV[place])
    redis.call('SREM', prefix .. 'o:' .. owner, ARGV[place])
  end
end
return 1
"""

# ARGV: prefix, owner. Forgets an owner that is gone and of whom nothing is left.
FORGET = """
if redis.call('SCARD', ARGV[1] .. 'o:' .. ARGV[2]) == 0 then redis.call('SREM', ARGV[1] .. 'g', ARGV[2]) end
return 1
"""

# ARGV: prefix, key, what is to be said, for how long (s). Says it to the owner of a stream that has not ended.
# Returns whether there is one that lives.
CALL = """
local prefix, key = ARGV[1], ARGV[2]
local found = redis.call('HMGET', prefix .. 'm:' .. key, 'own', 'ended')
if not found[1] or found[2] then return 0 end
local gateway, life = string.match(found[1], '^(.*):(%x+):%d+$')
if not life then return 0 end
if redis.call('GET', prefix .. 'l:' .. gateway) ~= life then return 0 end
local calls = prefix .. 'c:' .. gateway .. ':' .. life
redis.call('RPUSH', calls, ARGV[3])
redis.call('LTRIM', calls, -10000, -1)
redis.call('EXPIRE', calls, ARGV[4])
return 1
"""
