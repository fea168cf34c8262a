-- KEYS: base. ARGV: lineage. Buries the newest living checkpoint. Returns 1, or 0 where there is none.

local lineage = ARGV[1]
local values = record(lineage)
if not values then
  return 0
end
local refs = values.refs
local buried
for i = #refs, 1, -1 do
  if refs[i].dead == 0 then
    buried = refs[i]
    break
  end
end
if not buried then
  return 0
end
buried.raw = string.sub(buried.raw, 1, DEAD_AT - 1) .. '\1' .. string.sub(buried.raw, DEAD_AT + 1)

-- Its text stays readable for turns that carried it, but is marked; and no other session finds it any more.
local c, seal = base .. 'c:' .. buried.id, seal_of(buried.id)
local head = ask('GETRANGE', c, 0, #seal + CHAIN)
if head and #head == #seal + CHAIN + 1 and is_sealed(head, seal) then
  redis.call('SETRANGE', c, #seal + CHAIN, '\1')
end
local ending = base .. 'k:' .. buried.digest_k
local others = {}
for _, ref in ipairs(refs_in(ask('GET', ending)) or {}) do
  if ref.id ~= buried.id then
    others[#others + 1] = ref
  end
end
if #others > 0 then
  redis.call('SET', ending, packed(others), 'KEEPTTL')
else
  redis.call('DEL', ending)
end
redis.call('HSET', base .. 's:' .. lineage, 'refs', packed(refs), 'version', tonumber(values[AT.version]) + 1, 'last', values[AT.turns],
  'pending', '', 'since', '')
return 1
