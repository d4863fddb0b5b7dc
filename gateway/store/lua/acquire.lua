-- Takes a slot of the best worker that has a free one, or files a ticket that carries the call's bids.
--
--   ARGV[4]   id of the lease or ticket, new for each call
--   ARGV[5]   channel that grants to this gateway are published on
--   ARGV[6]   lifetime of the lease, ms
--   ARGV[7]   lifetime of the ticket, ms
--   ARGV[8]   maximum tickets that wait; a call beyond gets "full"
--   ARGV[9]   maximum tickets of one team; a call beyond gets "team full"
--   ARGV[10]  team
--   ARGV[11]  priority class; higher goes first
--   ARGV[12]  the call's charge, virtual tokens
--   ARGV[13]  ms from now within which its first token is wanted; 0: no deadline
--   ARGV[14]  the call's bids: their lines about workers (shared.lua)
--   ARGV[15]  weight of the team
--   ARGV[16+] workers to take at once, best first, in pairs: worker, KV tokens
-- Result: {"lease", fence, worker, boot, address} | {"queued", rank, start, position} | {"full", waiting} |
--   {"team full", waiting}
--
-- Keeps: no worker has more leases than slots and overdraft, and those beyond its slots are lent to teams that have
-- less than their share; nobody overtakes a waiting ticket that loses more by waiting, or one that was overtaken
-- MOST_PASSED times. Running it twice with one id is as running it once.
local id, channel, lease_ttl, ticket_ttl = ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local team, class, share, weight = ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[15]

local function queued_reply(rank, start)
  return {"queued", rank, start, (redis.call("ZRANK", queue_key, id) or 0) + 1}
end

local waiting = redis.call("ZCARD", queue_key)
local settles = false
if redis.call("EXISTS", ticket_key(id), lease_key(id), settling_key) > 0 then
  local ticket = redis.call("HMGET", ticket_key(id), "rank", "start")
  if ticket[1] then return queued_reply(ticket[1], ticket[2]) end
  if redis.call("EXISTS", lease_key(id)) == 1 then return lease_reply(id) end
  settles = true
end

local v, finish, num_of_team = team_read(team)
local start = math.max(v, finish)
finish = start + share

if waiting == 0 and not settles then
  for i = 16, #ARGV, 2 do
    local record, kv = open_worker(ARGV[i]), tonumber(ARGV[i + 1])
    if record and kv_fits(record, kv) then
      local fence = lease_take(record, id, GATEWAY, lease_ttl, kv, nil, team, weight, "share", ARGV[12])
      redis.call("HSET", fair_key, "v", exact(start), "f:" .. team, exact(finish))
      return {"lease", fence, record.worker, record.boot, record.address}
    end
  end
end

if waiting >= tonumber(ARGV[8]) or num_of_team >= tonumber(ARGV[9]) then
  -- Expired tickets must not make the line look full.
  for _, dead in ipairs(redis.call("ZRANGEBYSCORE", tickets_key, "-inf", now)) do
    if redis.call("ZSCORE", queue_key, dead) then ticket_drop(dead) end
  end
  waiting = redis.call("ZCARD", queue_key)
  if waiting >= tonumber(ARGV[8]) then return {"full", waiting} end
  num_of_team = tonumber(redis.call("HGET", fair_key, "n:" .. team)) or 0
  if num_of_team >= tonumber(ARGV[9]) then return {"team full", num_of_team} end
end

local rank = exact(finish - class * CLASS)
redis.call("HSET", fair_key, "f:" .. team, exact(finish), "n:" .. team, num_of_team + 1)
ticket_file(id, channel, ticket_ttl, team, weight, ARGV[12], exact(start), rank)
bids_write(id, ARGV[13], ARGV[14], team)
local granted = 0
if waiting > 0 then
  -- All that wait may want other workers only: then this call gets a slot at once.
  local workers = {}
  for i = 16, #ARGV, 2 do workers[#workers + 1] = ARGV[i] end
  granted = grant(perhaps_open(workers), nil, id)
end
-- No other ticket of its team waits: the team may be owed a slot beyond a worker's own.
if granted == 0 and num_of_team == 0 then granted = lend({id}, 2) end
if granted > 0 then
  local worker = redis.call("HGET", lease_key(id), "worker")
  if worker then
    grant_claim(worker, id, lease_ttl)
    return lease_reply(id)
  end
end
return queued_reply(rank, exact(start))
