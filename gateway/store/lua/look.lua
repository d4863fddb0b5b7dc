-- Returns the state of a model's line and leases, for people who ask.
--
--   ARGV[4]   least urgent priority class
--   ARGV[5]   most urgent priority class
--   ARGV[6+]  workers whose leases are to be returned
-- Result: {1 while Redis settles, else 0; number of tickets that wait; {class, its tickets, ...}; {team, its tickets,
--   ...}; the first WINDOW tickets, each a list: class, how often it was overtaken, its record; {leases,
--   leased KV tokens, ...} of each worker; Redis's clock in ms}
--
-- Keeps: nothing is changed.
local classes, teams, head, leased = {}, {}, {}, {}
for class = tonumber(ARGV[4]), tonumber(ARGV[5]) do
  local first = -class * CLASS
  local count = call("ZCOUNT", queue_key, format("%.17g", first), format("(%.17g", first + CLASS))
  if count > 0 then
    classes[#classes + 1] = class
    classes[#classes + 1] = count
  end
end

workers_leased()
for field in pairs(ledger) do
  if string.sub(field, 1, 2) == "t:" then
    local team = string.sub(field, 3)
    local _, num_tickets = team_read(team)
    if num_tickets > 0 then
      teams[#teams + 1] = team
      teams[#teams + 1] = num_tickets
    end
  end
end

for _, id in ipairs(call("ZRANGE", queue_key, 0, WINDOW - 1)) do
  local class = -math.floor(tonumber(call("ZSCORE", queue_key, id)) / CLASS)
  local text = call_read(id)
  if ticket_read(text) then head[#head + 1] = {class, tonumber(call("HGET", passed_key, id)) or 0, text} end
end

for i = 6, #ARGV do
  local _, leases, kv = leased_read(ledger_get("w:" .. ARGV[i]))
  leased[#leased + 1] = leases or 0
  leased[#leased + 1] = kv or 0
end
return {settling() and 1 or 0, call("ZCARD", queue_key), classes, teams, head, leased, now}
