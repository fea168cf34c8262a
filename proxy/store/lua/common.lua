-- In front of every script; SCHEMA and FIELDS come from Python (scripts.py).
-- KEYS[1] is what all keys of the root begin with, `wf:{TENANT.ROOT}:`. Scripts build the other keys from it: same tag, same slot.

local base = KEYS[1]
local owner = string.sub(base, 5, -3)
local faults = {}

local function fault(kind)
  faults[#faults + 1] = kind
end

-- The reply to a reading command, or nil where there is nothing or a value of another type.
local function ask(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    fault('type')
    return nil
  end
  return reply or nil
end

-- Whether a value begins with its seal `SCHEMA|owner|name`; says which part is wrong.
local function is_sealed(value, seal)
  if string.sub(value, 1, #seal) == seal then
    return true
  end
  if string.sub(value, 1, #SCHEMA + 1) ~= SCHEMA .. '|' then
    fault('schema')
  else
    fault('identity')
  end
  return false
end

-- Where a field stands in a record: values[AT.n].
local AT = {}
for i, name in ipairs(FIELDS) do
  AT[name] = i
end

-- References to checkpoints, packed one behind the other: see values.py.
local REF, DEAD_AT = '>I4I4I4I4c16c16c16BBc0Bc0', 65

local function unpacked(packed)
  local refs, at = {}, 1
  while at <= #packed do
    local ref, after = {}, nil
    ref.generation, ref.from, ref.k, ref.seen_len, ref.digest_k, ref.seen, ref.preamble, ref.dead, ref.id, ref.lineage, after =
      struct.unpack(REF, packed, at)
    ref.raw = string.sub(packed, at, after - 1)
    refs[#refs + 1] = ref
    at = after
  end
  return refs
end

-- The references in a value, or nil where it is none of ours.
local function refs_in(packed)
  local readable, refs = pcall(unpacked, packed or '')
  if not readable then
    fault('format')
    return nil
  end
  return refs
end

local function packed(refs)
  local raw = {}
  for i, ref in ipairs(refs) do
    raw[i] = ref.raw
  end
  return table.concat(raw)
end

-- A number as we write them: digits, few enough to be exact. tonumber takes '0x1', ' 1 ' and 'inf' too; HINCRBY and Python do not.
local function whole(text)
  return text and #text <= 15 and string.find(text, '^%d+$') and tonumber(text) or nil
end

local NEEDED = {'n', 'started', 'version', 'generation', 'turns'}
local OPTIONAL = {'last', 'fails', 'until', 'idle', 'since', 'touched', 'bodies_from', 'created'}

local function has_numbers(values)
  for _, name in ipairs(NEEDED) do
    if not whole(values[AT[name]]) then
      return false
    end
  end
  for _, name in ipairs(OPTIONAL) do
    local text = values[AT[name]]
    if text and text ~= '' and not whole(text) then
      return false
    end
  end
  return true
end

-- The session record as a list in the order of FIELDS, its references beside it as `refs`; nil where there is none that can be trusted. All
-- that a script computes with or keeps is checked here: one that stops half-way leaves what it has written until then.
local function record(lineage)
  local values = ask('HMGET', base .. 's:' .. lineage, unpack(FIELDS))
  if not values or not values[AT.id] or not is_sealed(values[AT.id], SCHEMA .. '|' .. owner .. '|' .. lineage .. '|') then
    return nil
  end
  if not has_numbers(values) then
    fault('format')
    return nil
  end
  values.refs = refs_in(values[AT.refs])
  return values.refs and values
end

local CHAIN, ENTRY = 16, 32

-- The chain digest of length i that the session's entries hold, or nil.
local function chain_at(lineage, i)
  if i < 1 then
    return nil -- GETRANGE would count from the end
  end
  local digest = ask('GETRANGE', base .. 'd:' .. lineage, ENTRY * (i - 1), ENTRY * (i - 1) + CHAIN - 1)
  return digest and #digest == CHAIN and digest or nil
end

-- Whether entries and record belong together: as many as the record says, ending where it ends.
local function entries_fit(lineage, values)
  local n = tonumber(values[AT.n])
  if n < 1 or ask('STRLEN', base .. 'd:' .. lineage) ~= ENTRY * n or chain_at(lineage, n) ~= values[AT.finish] then
    fault('entries')
    return false
  end
  return true
end

local function seal_of(id)
  return SCHEMA .. '|' .. owner .. '|' .. id .. '|'
end

-- Checkpoints of this root since a request last carried one. Without an end the number is not ours, and would hold compactions up for ever.
local function unapplied()
  local count = whole(ask('GET', base .. 'u'))
  return count and redis.call('PTTL', base .. 'u') >= 0 and count or 0
end
