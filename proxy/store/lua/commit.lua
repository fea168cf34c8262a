-- KEYS: base. ARGV: lineage, version it is based on, reference (packed), the checkpoint's value, time to live in ms, references to keep,
-- for how many ms unapplied checkpoints are counted.
-- Returns committed, or why not: gone, version, generation, order.

local lineage, version, raw, value, ttl, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local new = unpacked(raw)[1]
local values = record(lineage)
if not values then
  return 'gone'
end
if tonumber(values[AT.version]) ~= version then
  return 'version'
end
if new.generation ~= tonumber(values[AT.generation]) + 1 then
  return 'generation'
end
local refs = refs_in(values[AT.refs])
for i = #refs, 1, -1 do
  -- One of a branch that the session no longer has covers other messages.
  if refs[i].dead == 0 and chain_at(lineage, refs[i].k) == refs[i].digest_k then
    if new.k <= refs[i].k then
      return 'order'
    end
    break
  end
end

redis.call('SET', base .. 'c:' .. new.id, value, 'PX', ttl)
local ending = base .. 'k:' .. new.digest_k
local others = refs_in(ask('GET', ending))
table.insert(others, 1, new)
while #others > keep do
  table.remove(others)
end
redis.call('SET', ending, packed(others), 'PX', ttl)
redis.call('SET', base .. 'm', '1', 'PX', ttl)
-- Checkpoints of this root since one was last applied. It runs out by itself: that is the pause.
redis.call('INCR', base .. 'u')
redis.call('PEXPIRE', base .. 'u', ARGV[7])

refs[#refs + 1] = new
while #refs > keep do
  table.remove(refs, 1)
end
redis.call('HSET', base .. 's:' .. lineage, 'refs', packed(refs), 'version', version + 1, 'generation', new.generation)
return 'committed'
