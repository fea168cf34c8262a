-- KEYS: base. ARGV: lineage. Forgets the session, where its turns ended, its journal and all checkpoints it made. Returns 1, or 0 where there is none.

local lineage = ARGV[1]
local s, d = base .. 's:' .. lineage, base .. 'd:' .. lineage
local existed = redis.call('EXISTS', s)
local values = record(lineage)
local entries = ask('GET', d) or ''
local n = math.floor(#entries / ENTRY)

-- Visits what lies at head .. each chain digest. Read in slices: a GET for each takes longer, and nobody else is served meanwhile.
local function at_each_end(head, visit)
  for first = 1, n, 256 do
    local keys = {}
    for i = first, math.min(first + 255, n) do
      keys[#keys + 1] = head .. string.sub(entries, ENTRY * (i - 1) + 1, ENTRY * (i - 1) + CHAIN)
    end
    for at, value in ipairs(redis.call('MGET', unpack(keys))) do
      if value then
        visit(keys[at], value)
      end
    end
  end
end

local function forget_end(key, holder)
  if holder == lineage then
    redis.call('DEL', key)
  end
end

local function forget_checkpoints(ending, value)
  local others = {}
  for _, ref in ipairs(refs_in(value) or {}) do
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

at_each_end(base .. 'x::', forget_end)
if values and values[AT.explicit] and values[AT.explicit] ~= '' then
  at_each_end(base .. 'x:' .. values[AT.explicit] .. ':', forget_end)
end
at_each_end(base .. 'k:', forget_checkpoints)
for _, ref in ipairs(values and values.refs or {}) do
  local ending = base .. 'k:' .. ref.digest_k
  redis.call('DEL', base .. 'c:' .. ref.id)
  forget_checkpoints(ending, ask('GET', ending))
end
redis.call('DEL', s, d, base .. 'j:' .. lineage, base .. 'o:' .. lineage)
return existed
