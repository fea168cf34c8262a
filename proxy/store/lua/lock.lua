-- The lock of a session. KEYS: base. ARGV: take, renew, release or look; lineage; the asker's token; time to live in ms.
-- Returns 1 where it is the asker's now (take, renew), was until now (release), or is anybody's (look); else 0.

local verb, lineage, token, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key = base .. 'l:' .. lineage
local holder = ask('GET', key)
-- A lock has an end. What has none was not put there by us, and nobody would ever let go of it.
if holder and redis.call('PTTL', key) < 0 then
  holder = nil
end
if verb == 'look' then
  return holder and 1 or 0
end
if verb == 'take' then
  if holder then
    return 0
  end
  redis.call('SET', key, token, 'PX', ttl)
  return 1
end
if holder ~= token then
  return 0
end
if verb == 'renew' then
  redis.call('PEXPIRE', key, ttl)
else
  redis.call('DEL', key)
end
return 1
