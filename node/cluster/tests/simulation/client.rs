//! Clients of one node: they write what stays for ever, read it again, and act in the name of owners,
//! also of such that are owners no more.

use std::{
    collections::VecDeque,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use actors::ports::{Ledger as _, ProposeError};
use cluster::RaftLedger;
use domain::{
    AuditId, OrgId, RequestId,
    account::Mode,
    audit::{Actor, Audited},
    data_key::DataKey,
    directory,
    idempotency::Keyed,
    machine::{Answer, Claim, Entry},
    shard,
};

use crate::{
    dice::Dice,
    machine::{FOUNDERS, admission},
    world::{Place, World},
};

/// Longest pause between two calls of a client.
const PAUSE_MILLIS: u64 = 40;
/// Claims that an actor remembers after it has lost them.
const CLAIMS_KEPT: usize = 6;

/// Whose rows clients write into shards themselves.
pub(crate) const TOLD: OrgId = OrgId(1);
/// Whose rows are carried there from the directory.
pub(crate) const CARRIED: OrgId = OrgId(2);
/// Things that are written under an idempotency key have numbers from here on.
const ONCE: u64 = 1 << 40;

/// One client, for as long as its node lives.
pub(crate) async fn work(world: Arc<World>, number: usize, ledger: Arc<RaftLedger>, dice: Dice) {
    let mut client = Client { world, number, ledger, dice, claims: VecDeque::new() };
    while !client.world.is_over.load(Relaxed) {
        let pause = Duration::from_millis(client.dice.between(1, PAUSE_MILLIS));
        tokio::time::sleep(pause).await;
        client.call().await;
    }
}

struct Client {
    world: Arc<World>,
    number: usize,
    ledger: Arc<RaftLedger>,
    dice: Dice,
    claims: VecDeque<Claim>,
}

/// What is written: an item and its value.
fn kept(item: u64, value: u64) -> directory::Command {
    let created_at = domain::Timestamp::default();
    let key = DataKey { sealed: value.to_be_bytes().to_vec(), master: [0; 8], created_at };
    directory::Command::KeepDataKey { owner: OrgId(u128::from(item)), key: Box::new(key) }
}

fn row(org: OrgId, item: u64) -> Audited {
    let nobody = Actor { kind: "user".to_owned(), id: String::new(), ip: String::new() };
    Audited {
        id: AuditId(u128::from(item)),
        org,
        mode: Mode::Live,
        at: domain::Timestamp::default(),
        actor: nobody,
        action: "simulate".to_owned(),
        target: "x".repeat(200),
        outcome: "succeeded".to_owned(),
        request_id: RequestId(u128::from(item)),
        count: 1,
        hash: [0; 32],
        previous: [0; 32],
    }
}

impl Client {
    async fn call(&mut self) {
        if let Some((machine, status)) = self.world.take_order() {
            return self.carry_out(machine, status).await;
        }
        let shard = u16::try_from(self.dice.below(u64::from(self.world.shards))).expect("few");
        match self.dice.below(10) {
            0 | 1 => self.keep(None).await,
            2 => self.keep_once().await,
            3 | 4 => self.tell(shard, None).await,
            5 => self.act(shard).await,
            6 | 7 => self.look().await,
            _ => self.look_into(shard).await,
        }
    }

    /// A new thing, or another value for one that others have just written.
    async fn keep(&mut self, claim: Option<Claim>) {
        let is_contested = claim.is_none() && self.dice.is(1, 3);
        let old = match is_contested {
            true => self.world.some_item(Place::Directory, &mut self.dice),
            false => None,
        };
        let value = self.world.fresh();
        let item = old.filter(|item| *item < ONCE).unwrap_or(value);
        self.world.wanted(Place::Directory, item, value);
        let began = self.world.moment();
        let at = self.world.clock(self.number);
        // Its row waits in the directory's outbox and is carried to a shard from there.
        let audit = Some(Arc::new(row(CARRIED, value)));
        let entry = Entry { claim, audit, ..Entry::new(at, kept(item, value)) };
        let answer = self.ledger.change_directory(entry).await;
        if self.told("keep", item, &answer) {
            self.world.acknowledged(Place::Directory, item);
            self.world.to_be_carried(value);
            if let Some(claim) = claim {
                self.world.granted(Place::Directory, claim.shard, claim.term, began);
            }
        }
    }

    /// Two things under one idempotency key: one of them comes to be.
    async fn keep_once(&mut self) {
        let (first, second) = (ONCE + self.world.fresh(), ONCE + self.world.fresh());
        let mut hash = [7; 32];
        hash[..8].copy_from_slice(&first.to_be_bytes());
        let key = Some(Keyed { hash, fingerprint: [1; 32] });
        for item in [first, second] {
            self.world.wanted_once(first, item);
            let at = self.world.clock(self.number);
            let entry = Entry { key: key.clone(), ..Entry::new(at, kept(item, item)) };
            let answer = self.ledger.change_directory(entry).await;
            if self.told("once", item, &answer) {
                self.world.acknowledged_once(first);
            }
        }
    }

    async fn tell(&mut self, shard: u16, claim: Option<Claim>) {
        let item = self.world.fresh();
        let place = Place::Shard(shard);
        self.world.wanted(place, item, item);
        let began = self.world.moment();
        let at = self.world.clock(self.number);
        let told = shard::Command::Audit(vec![Arc::new(row(TOLD, item))]);
        let entry = Entry { claim, ..Entry::new(at, told) };
        let answer = self.ledger.change_shard(shard, entry).await;
        if self.told("tell", item, &answer) {
            self.world.acknowledged(place, item);
            if let Some(claim) = claim {
                self.world.granted(place, shard, claim.term, began);
            }
        }
    }

    /// In the name of a shard's owner; of one that may have been deposed since.
    async fn act(&mut self, shard: u16) {
        let led = self.ledger.leading().borrow().get(&shard).copied();
        if let Some(term) = led {
            let claim = Claim { shard, term };
            if self.claims.back() != Some(&claim) {
                self.claims.push_back(claim);
            }
            if self.claims.len() > CLAIMS_KEPT {
                self.claims.pop_front();
            }
        }
        let claims: Vec<Claim> = self.claims.iter().copied().collect();
        let Some(claim) = self.dice.pick(&claims).copied() else { return };
        self.world.count("acts of owners");
        match self.dice.is(1, 2) {
            true => self.keep(Some(claim)).await,
            false => self.tell(claim.shard, Some(claim)).await,
        }
    }

    async fn look(&mut self) {
        let Some(item) = self.world.some_item(Place::Directory, &mut self.dice) else { return };
        let began = self.world.moment();
        if self.ledger.refresh_directory().await.is_err() {
            return;
        }
        let found = self.ledger.directory().read().data_keys.get(&OrgId(u128::from(item)));
        let found = found.map(|key| {
            u64::from_be_bytes(key.sealed.as_slice().try_into().expect("what was written"))
        });
        self.world.count("reads");
        self.world.read(Place::Directory, item, began, found);
    }

    async fn look_into(&mut self, shard: u16) {
        let place = Place::Shard(shard);
        let Some(item) = self.world.some_item(place, &mut self.dice) else { return };
        let began = self.world.moment();
        if !self.ledger.has_shard(shard) || self.ledger.refresh_shard(shard).await.is_err() {
            return;
        }
        // It may have lost the replica meanwhile: then its rows are old, and nobody asks it.
        if !self.ledger.has_shard(shard) {
            return;
        }
        let id = AuditId(u128::from(item));
        let found = self.ledger.shard(shard).read().audit.get(&(TOLD.0, id)).map(|_| item);
        self.world.count("reads");
        self.world.read(place, item, began, found);
    }

    async fn carry_out(&mut self, machine: usize, status: domain::node::NodeStatus) {
        let of = &self.world.machines[machine];
        let joins = machine >= FOUNDERS && status == domain::node::NodeStatus::Active;
        let is_known = self.ledger.directory().read().nodes.get(&of.node_id()).is_some();
        let commands = match joins && !is_known {
            true => admission(&self.world, of).to_vec(),
            false => vec![directory::Command::SetNodeStatus { id: of.node_id(), to: status }],
        };
        for command in commands {
            let entry = Entry::new(self.world.clock(0), command);
            let answer = self.ledger.change_directory(entry).await.map(|answer| answer.result);
            if answer.is_err() {
                // Nobody knows whether it came to pass: somebody says it again.
                self.world.order(machine, status);
                return;
            }
        }
        self.world.note(&format!("node-{machine} is {status:?}"));
    }

    /// Notes what became of a write; says whether it was granted.
    fn told<R>(
        &self,
        what: &'static str,
        item: u64,
        answer: &Result<Answer<R>, ProposeError>,
    ) -> bool {
        let outcome = match answer {
            Ok(Answer { result: Ok(_), .. }) => "granted",
            Ok(_) => "refused",
            Err(_) => "unknown",
        };
        self.world.count(outcome);
        self.world.note(&format!("node-{} {what} {item}: {outcome}", self.number));
        outcome == "granted"
    }
}
