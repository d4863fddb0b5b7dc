-- Returns members of sets, or fields and values of hashes, in one string: for as many of the keys, in their order, as
-- fit, and of a large key a part at a time.
--
--   KEYS       sets or hashes
--   ARGV[1]    "hash" for hashes
--   ARGV[2]    maximum bytes of a text; of a longer one, the beginning is returned, one byte more than that
--   ARGV[3]    texts of one key after which no more of this key are returned
--   ARGV[4]    bytes after which no more texts are returned; there is a part of at least one key
--   ARGV[5...] for each key where to go on: "0", or the cursor that its last part came with
-- Result: for each key in turn one byte, the length of what follows (4 bytes), and that. 1: its texts; 3: the error, as
-- the key has another type. Each text comes behind its length (4 bytes): first the cursor, "0" at the end; then the
-- members, or fields and values in turn. A text may come twice.
--
-- Keeps: nothing is changed.
local is_hash, longest, most, bound = ARGV[1] == "hash", tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local FIRST = 4 -- number of arguments before those of the keys
-- Texts that are read between two checks of the limits: few at first, and where the last ones were long.
local FEWEST, MOST, FEW_BYTES = 4, 256, 131072
local bytes, told = 0, {}

local function part_of(name, cursor, count)
  if is_hash then return redis.pcall("HSCAN", name, cursor, "COUNT", count) end
  return redis.pcall("SSCAN", name, cursor, "COUNT", count)
end

for at, name in ipairs(KEYS) do
  local cursor, texts, kind, count = ARGV[FIRST + at], {}, 1, FEWEST
  repeat
    local part, read = part_of(name, cursor, count), 0
    if part.err then
      if not string.find(part.err, "WRONGTYPE", 1, true) then return part end
      kind, texts = 3, {part.err}
      break
    end
    cursor = part[1]
    for _, text in ipairs(part[2]) do
      read = read + #text
      if #text > longest then text = string.sub(text, 1, longest + 1) end
      texts[#texts + 1] = struct.pack(">I4", #text) .. text
      bytes = bytes + #text
    end
    local left = math.ceil((most - #texts) / (is_hash and 2 or 1))
    count = read <= FEW_BYTES and math.max(FEWEST, math.min(2 * count, MOST, left)) or FEWEST
  until cursor == "0" or #texts >= most or bytes >= bound
  local text = table.concat(texts)
  if kind == 1 then text = struct.pack(">I4", #cursor) .. cursor .. text end
  told[#told + 1] = struct.pack(">I1I4", kind, #text) .. text
  if bytes >= bound then break end
end
return table.concat(told)
