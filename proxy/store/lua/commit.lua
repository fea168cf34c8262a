-- KEYS: base. ARGV: lineage, version it is based on, reference (packed), the checkpoint's value, time to live in ms, references to keep,
-- for how many ms unapplied checkpoints are counted.
-- Returns committed, or why not: gone, version, generation, order.

local lineage, version, raw, value, ttl, keep = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
local new = unpacked(raw)[1]
local values = record(lineage)
if not values or not entries_fit(lineage, values) then
  return 'gone'
end
if tonumber(values[AT.version]) ~= version then
  return 'version'
end
if new.generation ~= tonumber(values[AT.generation]) + 1 then
  return 'generation'
end

-- One of a branch that the session no longer has covers other messages, or has seen others behind the same ones: it applies to no request
-- of this one, so it is in nobody's way.
local function is_ours(ref)
  return ref.dead == 0 and chain_at(lineage, ref.k) == ref.digest_k and chain_at(lineage, ref.seen_len) == ref.seen
end

local refs = values.refs
for i = #refs, 1, -1 do
  if is_ours(refs[i]) then
    if new.k <= refs[i].k then
      return 'order'
    end
    break
  end
end

redis.call('SET', base .. 'c:' .. new.id, value, 'PX', ttl)
local ending = base .. 'k:' .. new.digest_k
local others = refs_in(ask('GET', ending)) or {}
table.insert(others, 1, new)
while #others > keep do
  table.remove(others)
end
redis.call('SET', ending, packed(others), 'PX', ttl)
redis.call('SET', base .. 'm', '1', 'PX', ttl)
-- It runs out by itself: that is the pause. Not INCR, which stops at a value that is no number.
redis.call('SET', base .. 'u', unapplied() + 1, 'PX', ARGV[7])
-- The session has it now: nobody needs the one that was offered before.
redis.call('DEL', base .. 'o:' .. lineage)

refs[#refs + 1] = new
while #refs > keep do
  local oldest = table.remove(refs, 1)
  if oldest.dead ~= 0 then
    -- Nothing else leads to it any more, so a deletion of the session would leave its text behind.
    redis.call('DEL', base .. 'c:' .. oldest.id)
  end
end
redis.call('HSET', base .. 's:' .. lineage, 'refs', packed(refs), 'version', version + 1, 'generation', new.generation)
return 'committed'
