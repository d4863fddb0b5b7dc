-- Returns the state of a model's line and leases, for people who ask.
--
--   ARGV[4]   least urgent priority class
--   ARGV[5]   most urgent priority class
--   ARGV[6+]  workers whose leases are to be returned
-- Result: {1 while Redis settles, else 0; number of tickets that wait; {class, its tickets, ...}; {team, its tickets,
--   ...}; the first WINDOW tickets, each a list: class, then fields and values, `bids` and `passed` (how often it was
--   overtaken) among them; {leases, leased KV tokens, ...} of each worker; Redis's clock in ms}
--
-- Keeps: nothing is changed.
local classes, teams, head, leased = {}, {}, {}, {}
for class = tonumber(ARGV[4]), tonumber(ARGV[5]) do
  local first = -class * CLASS
  local count = redis.call("ZCOUNT", queue_key, exact(first), "(" .. exact(first + CLASS))
  if count > 0 then
    classes[#classes + 1] = class
    classes[#classes + 1] = count
  end
end

local fields = redis.call("HGETALL", fair_key)
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 2) == "n:" then
    teams[#teams + 1] = string.sub(fields[i], 3)
    teams[#teams + 1] = tonumber(fields[i + 1])
  end
end

for _, id in ipairs(redis.call("ZRANGE", queue_key, 0, WINDOW - 1)) do
  local ticket = redis.call("HGETALL", ticket_key(id))
  ticket[#ticket + 1] = "passed"
  ticket[#ticket + 1] = redis.call("HGET", fair_key, "p:" .. id) or "0"
  ticket[#ticket + 1] = "bids"
  ticket[#ticket + 1] = redis.call("GET", ticket_bids_key(id)) or ""
  table.insert(ticket, 1, -math.floor(tonumber(redis.call("ZSCORE", queue_key, id)) / CLASS))
  head[#head + 1] = ticket
end

for i = 6, #ARGV do
  local _, leases, kv = leased_read(redis.call("HGET", leased_key, ARGV[i]) or "- 0 0 0")
  leased[#leased + 1] = leases
  leased[#leased + 1] = kv
end
return {settling() and 1 or 0, redis.call("ZCARD", queue_key), classes, teams, head, leased, now}
