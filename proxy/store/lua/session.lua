-- KEYS: base. ARGV: lineage. Returns {fields or false, entries, faults}: record and entries of one moment.

local lineage = ARGV[1]
local values = record(lineage)
if not values or not entries_fit(lineage, values) then
  return {false, '', faults}
end
return {values, ask('GET', base .. 'd:' .. lineage), faults}
