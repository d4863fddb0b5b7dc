-- Re-reads this gateway's open tickets and keeps them alive; pub/sub only hurries what this finds.
--
--   ARGV[4]   channel that grants to this gateway are published on
--   ARGV[5]   how long to settle where Redis turns out to have lost its data, ms
--   ARGV[6+]  per ticket: id, lifetime in ms, arrival number, JSON array of workers to avoid (or empty)
-- Result: ids that hold a grant
--
-- Keeps: a ticket that Redis has lost is back at its old place, before everyone who came after it.
local granted, missing = {}, false
for i = 6, #ARGV, 4 do
  local id, ttl, arrival, avoid = ARGV[i], tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2]), ARGV[i + 3]
  if redis.call("EXISTS", ticket_key(id)) == 1 then
    redis.call("ZADD", tickets_key, now + ttl, id)
    if redis.call("EXISTS", lease_key(id)) == 1 then granted[#granted + 1] = id end
  elseif redis.call("EXISTS", lease_key(id)) == 0 then
    ticket_file(id, ARGV[4], arrival, ttl, avoid)
    if tonumber(redis.call("GET", arrivals_key) or 0) < arrival then
      redis.call("SET", arrivals_key, arrival)
      settle(tonumber(ARGV[5]))
    end
    missing = true
  end
end
if missing then grant_all() end
return granted
