-- KEYS: base. ARGV: lineage. Forgets the session, where its turns ended, its journal and all checkpoints it made. Returns 1, or 0 where there is none.

local lineage = ARGV[1]
local s, d = base .. 's:' .. lineage, base .. 'd:' .. lineage
local existed = redis.call('EXISTS', s)
local values = record(lineage)
local entries = ask('GET', d) or ''

local function forget_end(key)
  if ask('GET', key) == lineage then
    redis.call('DEL', key)
  end
end

local function forget_checkpoints(ending)
  local value = ask('GET', ending)
  if not value then
    return
  end
  local others = {}
  for _, ref in ipairs(refs_in(value)) do
    if ref.lineage == lineage then
      redis.call('DEL', base .. 'c:' .. ref.id)
    else
      others[#others + 1] = ref
    end
  end
  if #others > 0 then
    redis.call('SET', ending, packed(others), 'KEEPTTL')
  else
    redis.call('DEL', ending)
  end
end

for i = 1, #entries / ENTRY do
  local digest = string.sub(entries, ENTRY * (i - 1) + 1, ENTRY * (i - 1) + CHAIN)
  forget_end(base .. 'x::' .. digest)
  if values and values[AT.explicit] and values[AT.explicit] ~= '' then
    forget_end(base .. 'x:' .. values[AT.explicit] .. ':' .. digest)
  end
  forget_checkpoints(base .. 'k:' .. digest)
end
if values then
  for _, ref in ipairs(refs_in(values[AT.refs])) do
    redis.call('DEL', base .. 'c:' .. ref.id)
    forget_checkpoints(base .. 'k:' .. ref.digest_k)
  end
end
redis.call('DEL', s, d, base .. 'j:' .. lineage)
return existed
