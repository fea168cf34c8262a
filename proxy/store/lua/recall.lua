-- KEYS: base. ARGV: explicit id or '', chain digests one behind the other, limit of foreign checkpoints, steps to walk at most.
-- Returns {session or false, own checkpoint or false, foreign checkpoints, faults, checkpoints of the root that nobody used}; session = {lineage, matched, fields, entries}.

local explicit, chain, most_foreign = ARGV[1], ARGV[2], tonumber(ARGV[3])
local n = #chain / CHAIN
-- The server does nothing else meanwhile, and the length is a client's choice.
local nearest = math.max(1, n - tonumber(ARGV[4]) + 1)

local function prefix(i)
  return string.sub(chain, CHAIN * (i - 1) + 1, CHAIN * i)
end

-- A lineage ended turns at many lengths: its record is read once.
local seen_before = {}

local function trusted(lineage)
  if seen_before[lineage] == nil then
    local values = record(lineage)
    seen_before[lineage] = values and entries_fit(lineage, values) and values or false
  end
  return seen_before[lineage]
end

-- The first result of `visit(i, value)` for the values at head .. prefix(i), from the longest prefix down. Read in slices that grow: a client
-- that goes on is found in the first one, and a walk in vain takes half the time it takes with a GET for each.
local function backwards(head, longest, visit)
  local size = 4
  while longest >= nearest do
    local shortest = math.max(nearest, longest - size + 1)
    local keys = {}
    for i = longest, shortest, -1 do
      keys[#keys + 1] = head .. prefix(i)
    end
    for at, value in ipairs(redis.call('MGET', unpack(keys))) do
      local result = value and visit(longest - at + 1, value)
      if result then
        return result
      end
    end
    longest = shortest - 1
    size = math.min(size * 2, 256)
  end
  return nil
end

-- The longest prefix of the request at which a turn ended, whose session still lives and still has this prefix.
local function find(namespace)
  return backwards(base .. 'x:' .. namespace .. ':', n, function(i, lineage)
    local values = trusted(lineage)
    if values and i <= tonumber(values[AT.n]) and chain_at(lineage, i) == prefix(i) then
      return {lineage, i, values, ask('GET', base .. 'd:' .. lineage)}
    end
  end)
end

-- Covered and seen prefixes lie on the request's chain, and a message is left behind the covered one. Beyond either end of the chain a prefix
-- is '', which no digest equals.
local function covers(ref)
  return ref.dead == 0 and ref.k < n and ref.k <= ref.seen_len and prefix(ref.k) == ref.digest_k and prefix(ref.seen_len) == ref.seen
end

local function checkpoint(ref)
  local value = ask('GET', base .. 'c:' .. ref.id)
  local seal = seal_of(ref.id)
  if not value or not is_sealed(value, seal) then
    return nil
  end
  return string.sub(value, #seal + 1, #seal + CHAIN) == ref.digest_k and value or nil
end

local function own(values)
  local refs = values.refs
  for i = #refs, 1, -1 do
    local value = covers(refs[i]) and checkpoint(refs[i])
    if value then
      return value
    end
  end
  return false
end

-- One per preamble: the caller takes the first whose preamble is the request's, so a second one would never be taken.
local function foreign()
  local found, preambles = {}, {}
  if ask('EXISTS', base .. 'm') ~= 1 then
    return found
  end
  backwards(base .. 'k:', n - 1, function(k, value)
    for _, ref in ipairs(refs_in(value) or {}) do
      local text = ref.k == k and not preambles[ref.preamble] and covers(ref) and checkpoint(ref)
      if text then
        preambles[ref.preamble] = true
        found[#found + 1] = text
        if #found == most_foreign then
          return found
        end
      end
    end
  end)
  return found
end

local session = find(explicit) or (explicit ~= '' and find('')) or false
local mine = false
-- Only a request that continues the session may have its checkpoint unasked; for a fork it is one among the root's.
if session and session[2] == tonumber(session[3][AT.n]) and session[3][AT.explicit] == explicit then
  mine = own(session[3])
end
return {session, mine, mine and {} or foreign(), faults, unapplied()}
