-- What workers have written of themselves, in one string: of as many of the keys, in their order, as have room.
--
--   KEYS     workers' records, or their heads
--   ARGV[1]  bytes of one beyond which it is left out
--   ARGV[2]  bytes after which no more keys are told; one is told at least
--   ARGV[3]  for records: the field that counts, ARGV[4] that of its seal. Without them: heads
-- Result: for each key that is told one byte, the length of what follows (4 bytes) and that: 0 nothing, as it is not
-- there; 1 the heads, or the length of the record's first field (4 bytes) and both fields; 2 the number of its bytes, as
-- text, where it is too long; 3 the error, where something of another type is there
--
-- Keeps: everything as it is.
local longest, bound, bytes, told = tonumber(ARGV[1]), tonumber(ARGV[2]), 0, {}
local field, seal = ARGV[3], ARGV[4]

local function size_of(name)
  if not field then return redis.pcall("STRLEN", name) end
  local size = redis.pcall("HSTRLEN", name, field)
  return type(size) == "number" and size + redis.pcall("HSTRLEN", name, seal) or size
end

local function value_of(name)
  if not field then return redis.call("GET", name) end
  local values = redis.call("HMGET", name, field, seal)
  local value = values[1] or ""
  return struct.pack(">I4", #value) .. value .. (values[2] or "")
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
