# What tokens cost: half a unit a million in, one and a half out.
loraplex price set --input 0.5 --output 1.5
# A tenant with a minute's limit, a day's budget of money, and one adapter that it may use.
loraplex tenant create poets --requests-per-min 60 --spend-per-day 5 --model pirate
# Its key: printed once, kept only as a hash.
export LORAPLEX_API_KEY=$(loraplex tenant key-create poets)
loraplex chat pirate "Describe the sea."
# Its quota changes while it chats: what runs goes on, the next request meets the new limit.
loraplex tenant set poets --requests-per-min 2
loraplex tenant show poets --json
# Its bill: by the hour, one record a request, and checked against what the replicas counted.
loraplex usage --by tenant,adapter --json
loraplex usage export --format csv --output bill.csv
loraplex usage reconcile
loraplex events --limit 5
