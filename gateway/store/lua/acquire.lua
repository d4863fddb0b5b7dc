-- Takes a slot of the best worker that has one, or files a ticket that carries the call's bids.
--
--   ARGV[4]   id of the lease or ticket, new for each call
--   ARGV[5]   channel that grants to this gateway are published on
--   ARGV[6]   lifetime of the lease, ms
--   ARGV[7]   lifetime of the ticket, ms
--   ARGV[8]   most tickets that may wait
--   ARGV[9]   most tickets of one team that may wait
--   ARGV[10]  team
--   ARGV[11]  priority class; higher goes first
--   ARGV[12]  what the call is charged, virtual tokens
--   ARGV[13]  ms from now within which its first token is wanted; 0: no matter when
--   ARGV[14]  ms that its answer takes
--   ARGV[15]  bid for any worker that is not named; empty: no other would do
--   ARGV[16]  workers that would not do, between blanks, or empty
--   ARGV[17]  how many of the bids that follow are for workers to take at once
--   ARGV[18+] pairs: worker, bid ("cost else kv"); those to take first, best first
-- Result: {"lease", fence, worker, boot, address} | {"queued", rank, start, position} | {"full", waiting} |
--   {"team full", waiting}
--
-- Keeps: no worker has more leases than slots; nobody overtakes a waiting ticket that loses more by waiting, and no ticket
-- is overtaken more than MOST_PASSED times by those that want the same slot. Running it twice with one id is running it
-- once.
local id, channel, lease_ttl, ticket_ttl = ARGV[4], ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7])
local team, class, share, num_take = ARGV[10], tonumber(ARGV[11]), tonumber(ARGV[12]), tonumber(ARGV[17])

local function queued_reply()
  local ticket = redis.call("HMGET", ticket_key(id), "rank", "start")
  return {"queued", ticket[1], ticket[2], (redis.call("ZRANK", queue_key, id) or 0) + 1}
end

if redis.call("EXISTS", ticket_key(id)) == 1 then return queued_reply() end
if redis.call("EXISTS", lease_key(id)) == 1 then return lease_reply(id) end

local waiting = redis.call("ZCARD", queue_key)
if waiting == 0 and not settling() then
  for i = 18, 17 + 2 * num_take, 2 do
    local record = open_worker(ARGV[i])
    if record then
      local _, _, kv = bid_read(ARGV[i + 1])
      if kv_fits(record, kv) then
        local fence = lease_take(record, id, GATEWAY, lease_ttl, kv)
        redis.call("HSET", lease_key(id), "team", team, "share", ARGV[12])
        virtual_time_reaches((charge(team, share)))
        return {"lease", fence, record.worker, record.boot, record.address}
      end
    end
  end
end

local function num_of_team() return tonumber(redis.call("HGET", fair_key, "n:" .. team)) or 0 end

if waiting >= tonumber(ARGV[8]) or num_of_team() >= tonumber(ARGV[9]) then
  -- Dead tickets must not make the line look full.
  for _, dead in ipairs(redis.call("ZRANGEBYSCORE", tickets_key, "-inf", now)) do
    if redis.call("ZSCORE", queue_key, dead) then ticket_drop(dead) end
  end
  waiting = redis.call("ZCARD", queue_key)
  if waiting >= tonumber(ARGV[8]) then return {"full", waiting} end
  if num_of_team() >= tonumber(ARGV[9]) then return {"team full", num_of_team()} end
end

local start, finish = charge(team, share)
ticket_file(id, channel, ticket_ttl, team, share, start, finish - class * CLASS)
bids_write(id, ARGV[15], ARGV[16], ARGV[13], ARGV[14], 18, #ARGV)
if waiting > 0 then
  -- Those who wait may all want other workers.
  local workers = {}
  for i = 18, 17 + 2 * num_take, 2 do workers[#workers + 1] = ARGV[i] end
  grant(workers, nil, id)
  local worker = redis.call("HGET", lease_key(id), "worker")
  if worker then
    grant_claim(worker, id, lease_ttl)
    return lease_reply(id)
  end
end
return queued_reply()
