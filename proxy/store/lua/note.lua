-- KEYS: base. ARGV: lineage, the line, lines to keep, time to live in ms, last_turn or '', failures, not_before_ms, unapplied.
-- Returns 1, or 0 where the session is gone. `turns` stays: one may have been saved while the compaction ran.

local lineage, line, keep, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local values = record(lineage)
if not values then
  return 0
end
local j = base .. 'j:' .. lineage
if redis.call('TYPE', j).ok ~= 'list' then
  redis.call('DEL', j)
end
redis.call('LPUSH', j, line)
redis.call('LTRIM', j, 0, keep - 1)
redis.call('PEXPIRE', j, ttl)
-- An attempt that ends behind a newer one (its worker slept and lost the lock) does not bring the next one nearer.
local last, known = tonumber(ARGV[5]), whole(values[AT.last])
if last and known and known > last then
  last = known
end
redis.call('HSET', base .. 's:' .. lineage, 'last', last or ARGV[5], 'fails', ARGV[6], 'until', ARGV[7], 'idle', ARGV[8], 'pending', '', 'since', '')
return 1
