-- Returns workers' records or heads in one string, for as many of the keys, in their order, as fit.
--
--   KEYS     workers' records, or the keys of their heads
--   ARGV[1]  maximum bytes of one; a longer one is left out
--   ARGV[2]  bytes after which no more keys are returned; at least one is
--   ARGV[3]  for records: name of the field to return, ARGV[4] name of the field with its seal. Without them: heads
-- Result: for each key in turn one byte, the length of what follows (4 bytes), and that. 0: nothing, as there is no
-- such key; 1: the heads, or the ms until the record expires (4 bytes; all bits set: never), the length of its field (4
-- bytes), that field and its seal; 2: the number of its bytes, as text, as it is too long; 3: the error, as the key has
-- another type
--
-- Keeps: nothing is changed.
local longest, bound, bytes, told = tonumber(ARGV[1]), tonumber(ARGV[2]), 0, {}
local field, seal = ARGV[3], ARGV[4]
local NEVER = 2 ^ 32 - 1

local function size_of(name)
  if not field then return redis.pcall("STRLEN", name) end
  local size = redis.pcall("HSTRLEN", name, field)
  return type(size) == "number" and size + redis.pcall("HSTRLEN", name, seal) or size
end

local function value_of(name)
  if not field then return redis.call("GET", name) end
  local values = redis.call("HMGET", name, field, seal)
  local value, left = values[1] or "", redis.call("PTTL", name)
  if left < 0 or left > NEVER then left = NEVER end
  return struct.pack(">I4I4", left, #value) .. value .. (values[2] or "")
end

for _, name in ipairs(KEYS) do
  local size, kind, text = size_of(name), 0, ""
  if type(size) ~= "number" then
    if not string.find(size.err, "WRONGTYPE", 1, true) then return size end
    kind, text = 3, size.err
  elseif size > longest then
    kind, text = 2, tostring(size)
  elseif size > 0 then
    kind, text = 1, value_of(name)
  end
  told[#told + 1] = struct.pack(">I1I4", kind, #text) .. text
  bytes = bytes + #text
  if bytes >= bound then break end
end
return table.concat(told)
