-- What workers have told since an entry of `pd:news`, in one string: a gateway reads that twenty times as fast as the
-- same entries one by one.
--
--   KEYS[1]  the stream
--   ARGV[1]  id of the last entry that was read; "" for the first time: some are told that are a little older
--   ARGV[2]  most entries, ARGV[3] how old at the first time, ms
--   ARGV[4]  bytes of a value beyond which it is left out: an empty one is told in its place
--   ARGV[5]  bytes of all values, left out or not, after which no more are told
-- Result: id of the last entry told, or of the last there is where none is told ("0-0": of none); for each entry
-- its age in ms and its length (4 bytes each) and its value; 1 where there are more, else 0
--
-- Keeps: everything as it is.
local now = redis.call("TIME")
now = now[1] * 1000 + math.floor(now[2] / 1000)
local last, told = ARGV[1], {}
if last == "" then last = string.format("%.0f-0", now - ARGV[3]) end
local FEW, SHORT = 4, 65536 -- entries that are read first, and after ones that were longer together than that
local step = FEW
local most, longest, bound, bytes, more = tonumber(ARGV[2]), tonumber(ARGV[4]), tonumber(ARGV[5]), 0, 1
while more == 1 and #told < most and bytes < bound do
  local wanted, before = math.min(step, most - #told), bytes
  local entries = redis.call("XRANGE", KEYS[1], "(" .. last, "+", "COUNT", wanted)
  if #entries < wanted then more = 0 end
  for at, entry in ipairs(entries) do
    local value = entry[2][2]
    bytes = bytes + #value
    if #value > longest then value = "" end
    local age = now - tonumber(string.match(entry[1], "^%d+"))
    told[#told + 1] = struct.pack(">I4I4", math.max(0, math.min(age, 4000000000)), #value) .. value
    last = entry[1]
    if bytes >= bound then
      if at < #entries then more = 1 end
      break
    end
  end
  step = bytes - before < SHORT and step * 4 or FEW
end
if #told == 0 then
  local newest = redis.call("XREVRANGE", KEYS[1], "+", "-", "COUNT", 1)[1]
  last = newest and newest[1] or "0-0"
end
return {last, table.concat(told), more}
