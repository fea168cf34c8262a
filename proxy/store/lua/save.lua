-- KEYS: base, then the keys of the bytes that this turn brought. ARGV: see writer.py.
-- Returns stored, stale (an older turn than the stored one), gap (what it builds on is gone) or missing (bytes that did not get in).

local lineage, explicit, n, finish, started = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local from, before, entries = tonumber(ARGV[6]), ARGV[7], ARGV[8]
local applied, renewed, now, session_ttl, checkpoint_ttl = ARGV[9], ARGV[10], ARGV[11], ARGV[12], ARGV[13]
local inherited = {'turns', ARGV[14], 'last', ARGV[15], 'fails', ARGV[16], 'until', ARGV[17], 'idle', ARGV[18]}
local turn, bodies_from, pending, since = ARGV[19], ARGV[20], ARGV[21], ARGV[22]
local s, d = base .. 's:' .. lineage, base .. 'd:' .. lineage

-- A header without its bytes would be found and never rebuilt, so it is not written. In slices: unpack has a limit.
for first = 2, #KEYS, 1000 do
  local last = math.min(first + 999, #KEYS)
  if redis.call('EXISTS', unpack(KEYS, first, last)) ~= last - first + 1 then
    return 'missing'
  end
end

local old = record(lineage)
-- A record whose entries are gone is newer than nothing; its counters and its generation still count.
local fits = old and entries_fit(lineage, old)
if fits then
  local had, since_then = tonumber(old[AT.n]), tonumber(old[AT.started])
  if n < had or (n == had and started < since_then) then
    return 'stale'
  end
end
if from > 0 then
  -- Two turns may have left the same end side by side: only the one whose prefix is still the stored one is put behind it. And nothing is
  -- put into entries that are damaged: what they hold behind it would stay there.
  local joint = fits and chain_at(lineage, from)
  if not joint or (before ~= '' and joint ~= before) then
    return 'gap'
  end
else
  redis.call('DEL', d)
end
if not old then
  redis.call('DEL', s)
  redis.call('HSET', s, 'id', SCHEMA .. '|' .. owner .. '|' .. lineage .. '|', 'version', 0, 'generation', 0, 'refs', '', 'created', now,
    'touched', 0, unpack(inherited))
end
redis.call('HSET', s, 'n', n, 'finish', finish, 'started', ARGV[5], 'explicit', explicit, 'turn', turn, 'bodies_from', bodies_from,
  'pending', pending, 'since', since)
redis.call('HINCRBY', s, 'turns', 1)
if renewed == '1' then
  redis.call('HSET', s, 'touched', now)
end
redis.call('SETRANGE', d, ENTRY * from, entries)
redis.call('PEXPIRE', s, session_ttl)
redis.call('PEXPIRE', d, session_ttl)
redis.call('PEXPIRE', base .. 'j:' .. lineage, session_ttl)

redis.call('SET', base .. 'x:' .. explicit .. ':' .. finish, lineage, 'PX', session_ttl)
if explicit ~= '' then
  -- The tenant's entry goes to whoever came first, while that one lives.
  local entry = base .. 'x::' .. finish
  local holder = ask('GET', entry)
  if not holder or holder == lineage or not record(holder) then
    redis.call('SET', entry, lineage, 'PX', session_ttl)
  end
end

if applied ~= '' then
  redis.call('HSET', s, 'idle', 0)
  redis.call('DEL', base .. 'u')
  local seal = seal_of(applied)
  local head = ask('GETRANGE', base .. 'c:' .. applied, 0, #seal + CHAIN - 1)
  if head and #head == #seal + CHAIN and is_sealed(head, seal) then
    redis.call('PEXPIRE', base .. 'c:' .. applied, checkpoint_ttl)
    redis.call('PEXPIRE', base .. 'k:' .. string.sub(head, #seal + 1), checkpoint_ttl)
    redis.call('PEXPIRE', base .. 'm', checkpoint_ttl)
  end
end
return 'stored'
