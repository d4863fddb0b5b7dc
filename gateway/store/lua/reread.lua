-- Re-reads this gateway's open tickets, keeps them alive and renews their bids. It also finds grants missed on pub/sub.
--
--   ARGV[4]   channel that grants to this gateway are published on
--   ARGV[5]   how long to settle (shared.lua) if Redis has lost its data, ms
--   ARGV[6+]  per ticket: id, lifetime in ms, team, its weight, charge, start, rank (from `acquire`), ms within which
--             its first token is wanted, bids (empty: as they were), number of workers to take at once, those workers
-- Result: {positions in the line, one per ticket, 0 for those that hold a grant}
--
-- Keeps: a ticket that Redis has lost is back at its old place, before everyone who came after it.
local NO_BIDS = "\n\n|" -- of a ticket that was lost, until its gateway sends its bids
local places, wanted, missing, i = {}, {}, false, 6
while i <= #ARGV do
  local id, ttl, team, num_take = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2], tonumber(ARGV[i + 9])
  local granted, lost = redis.call("EXISTS", lease_key(id)) == 1, false
  local known = redis.call("ZADD", tickets_key, "XX", "CH", now + ttl, id) == 1 or redis.call("ZSCORE", tickets_key, id)
  if not granted and not (known and redis.call("EXISTS", ticket_key(id)) == 1) then
    local start = tonumber(ARGV[i + 5])
    local v, _, num_of_team = team_read(team)
    redis.call("HSET", fair_key, "n:" .. team, num_of_team + (known and 0 or 1))
    if v < start then
      virtual_time_reaches(start)
      settle(tonumber(ARGV[5]))
    end
    ticket_file(id, ARGV[4], ttl, team, ARGV[i + 3], ARGV[i + 4], ARGV[i + 5], ARGV[i + 6])
    missing, lost = true, true
  end
  local bids = ARGV[i + 8] == "" and lost and NO_BIDS or ARGV[i + 8]
  if bids ~= "" and not granted then bids_write(id, ARGV[i + 7], bids, team) end
  for at = i + 10, i + 9 + num_take do wanted[ARGV[at]] = true end
  places[#places + 1] = granted and 0 or (redis.call("ZRANK", queue_key, id) or 0) + 1
  i = i + 10 + num_take
end
if missing then
  grant_all()
else
  -- With its new bids, a ticket may want a free slot that none wanted before.
  local workers = {}
  for worker in pairs(wanted) do workers[#workers + 1] = worker end
  grant(perhaps_open(workers))
end
return places
