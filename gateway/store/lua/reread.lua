-- Re-reads this gateway's open tickets, keeps them alive and renews what they bid; pub/sub only hurries what this finds.
--
--   ARGV[4]   channel that grants to this gateway are published on
--   ARGV[5]   how long to settle where Redis turns out to have lost its data, ms
--   ARGV[6+]  per ticket: id, lifetime in ms, team, charge, start, rank (as `acquire` has told them), then its bids as
--             `acquire` takes them: deadline, ms of its answer, bid for others, workers that would not do, number of bids
--             to take at once, number of bids, and pairs of worker and bid. A number of bids of -1: they stay as they are
-- Result: {positions in the line, one per ticket, 0 for those that hold a grant}
--
-- Keeps: a ticket that Redis has lost is back at its old place, before everyone who came after it.
local places, wanted, missing, i = {}, {}, false, 6
while i <= #ARGV do
  local id, ttl = ARGV[i], tonumber(ARGV[i + 1])
  local num_take, num_bids = tonumber(ARGV[i + 10]), tonumber(ARGV[i + 11])
  local first, last = i + 12, i + 11 + 2 * math.max(0, num_bids)
  local granted = redis.call("EXISTS", lease_key(id)) == 1
  local there = redis.call("EXISTS", ticket_key(id)) == 1
  if there then
    redis.call("ZADD", tickets_key, now + ttl, id)
    redis.call("HSET", ticket_key(id), "until", exact(now + ttl))
  elseif not granted then
    local start, rank = tonumber(ARGV[i + 4]), tonumber(ARGV[i + 5])
    if virtual_time() < start then
      virtual_time_reaches(start)
      settle(tonumber(ARGV[5]))
    end
    ticket_file(id, ARGV[4], ttl, ARGV[i + 2], tonumber(ARGV[i + 3]), start, rank)
    missing = true
  end
  if num_bids >= 0 and not granted then
    local old = {}
    for _, field in ipairs(redis.call("HKEYS", ticket_key(id))) do
      if string.sub(field, 1, 2) == "b:" then old[#old + 1] = field end
    end
    if #old > 0 then redis.call("HDEL", ticket_key(id), unpack(old)) end
    bids_write(id, ARGV[i + 8], ARGV[i + 9], ARGV[i + 6], ARGV[i + 7], first, last)
    for at = first, first + 2 * num_take - 1, 2 do wanted[ARGV[at]] = true end
  end
  places[#places + 1] = granted and 0 or (redis.call("ZRANK", queue_key, id) or 0) + 1
  i = last + 1
end
if missing then
  grant_all()
else
  -- A slot that nobody was better off with may be wanted now.
  local workers = {}
  for worker in pairs(wanted) do workers[#workers + 1] = worker end
  grant(workers)
end
return places
