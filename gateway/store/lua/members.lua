-- Members of sets, or fields of hashes with their values, in one string: of as many of the keys, in their order, as have
-- room, and of a large one a part at a time.
--
--   KEYS       sets or hashes
--   ARGV[1]    "hash" for hashes
--   ARGV[2]    bytes of a text beyond which only its beginning is told, one byte more than that
--   ARGV[3]    texts of one key after which no more of it are told
--   ARGV[4]    bytes after which no more are told; something is told of one key at least
--   ARGV[5...] for each key where to go on: "0", or what the last part told
-- Result: for each key that is told one byte, the length of what follows (4 bytes) and that: 1 its texts, as below;
-- 3 the error, where something of another type is there. Texts, each behind its length (4 bytes): where to go on, "0" at
-- the end; then the members, or fields and values in turn. One may be told twice.
--
-- Keeps: everything as it is.
local is_hash, longest, most, bound = ARGV[1] == "hash", tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local FIRST = 4 -- arguments before the first key's own
local STEP = 256 -- texts that are looked at between two looks at the bounds
local bytes, told = 0, {}

local function part_of(name, cursor)
  if is_hash then return redis.pcall("HSCAN", name, cursor, "COUNT", STEP) end
  return redis.pcall("SSCAN", name, cursor, "COUNT", STEP)
end

for at, name in ipairs(KEYS) do
  local cursor, texts, kind = ARGV[FIRST + at], {}, 1
  repeat
    local part = part_of(name, cursor)
    if part.err then
      if not string.find(part.err, "WRONGTYPE", 1, true) then return part end
      kind, texts = 3, {part.err}
      break
    end
    cursor = part[1]
    for _, text in ipairs(part[2]) do
      if #text > longest then text = string.sub(text, 1, longest + 1) end
      texts[#texts + 1] = struct.pack(">I4", #text) .. text
      bytes = bytes + #text
    end
  until cursor == "0" or #texts >= most or bytes >= bound
  local text = table.concat(texts)
  if kind == 1 then text = struct.pack(">I4", #cursor) .. cursor .. text end
  told[#told + 1] = struct.pack(">I1I4", kind, #text) .. text
  if bytes >= bound then break end
end
return table.concat(told)
