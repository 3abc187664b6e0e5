//! What goes wrong, and when: drawn from the seed.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering::Relaxed,
};

use actors::ports::Ledger as _;
use domain::node::NodeStatus;
use turmoil::Sim;

use crate::{dice::Dice, machine::FOUNDERS, world::World};

/// Pauses between faults, and how long one lasts, in milliseconds.
const BETWEEN: (u64, u64) = (100, 900);
const LASTS: (u64, u64) = (100, 2500);
/// How far a clock jumps at most: less than idempotency keys are kept.
const JUMP_MILLIS: u64 = 3_600_000;
/// How slow a slow disk is at most.
const SLOW_MILLIS: u64 = 250;

enum End {
    PowerOn(usize),
    Repair(Vec<(usize, usize)>),
    Release(usize),
    Fast(usize),
}

/// Faults to come, and ends of those that are.
pub(crate) struct Faults {
    dice: Dice,
    next: u64,
    ends: Vec<(u64, End)>,
    held: BTreeSet<usize>,
    /// How many reasons there are for a way between two machines to be cut.
    cuts: BTreeMap<(usize, usize), usize>,
    drained: Option<usize>,
    late: bool,
}

impl Faults {
    /// From a seed.
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed, u64::MAX);
        let (next, late) = (dice.between(BETWEEN.0, BETWEEN.1), dice.is(1, 2));
        let (ends, held, cuts, drained) = Default::default();
        Self { dice, next, ends, held, cuts, drained, late }
    }

    /// What is due.
    pub(crate) fn step(&mut self, sim: &mut Sim<'_>, world: &World, millis: u64) {
        let due: Vec<End> =
            self.ends.extract_if(.., |(at, _)| *at <= millis).map(|(_, end)| end).collect();
        due.into_iter().for_each(|end| self.end(sim, world, end));
        if millis >= self.next {
            self.next = millis + self.dice.between(BETWEEN.0, BETWEEN.1);
            self.begin(sim, world, millis);
        }
    }

    /// Everything is well again.
    pub(crate) fn heal(&mut self, sim: &mut Sim<'_>, world: &World) {
        let ends = std::mem::take(&mut self.ends);
        ends.into_iter().for_each(|(_, end)| self.end(sim, world, end));
        if let Some(machine) = self.drained.take() {
            world.order(machine, NodeStatus::Active);
        }
        world.note("everything is well again");
    }

    fn begin(&mut self, sim: &mut Sim<'_>, world: &World, millis: u64) {
        let machine = usize::try_from(self.dice.below(world.machines.len() as u64)).expect("few");
        let until = millis + self.dice.between(LASTS.0, LASTS.1);
        match self.dice.below(12) {
            0..=2 => self.cut_power(sim, world, machine, until),
            3 if self.dice.is(1, 2) => {
                let all = 0..world.machines.len();
                all.for_each(|machine| self.cut_power(sim, world, machine, until));
            }
            4 | 5 => self.part(sim, world, machine, until),
            6 => {
                let leads = |world: &World| {
                    world
                        .machines
                        .iter()
                        .position(|one| one.node().is_some_and(|node| node.leads_directory()))
                };
                if let Some(leader) = leads(world) {
                    self.part(sim, world, leader, until);
                }
            }
            7 => self.part_one_way(sim, world, machine, until),
            8 => self.hold(sim, world, machine, until),
            9 => {
                let slow = self.dice.between(20, SLOW_MILLIS);
                world.machines[machine].slow_millis.store(slow, Relaxed);
                world.note(&format!("the disk of node-{machine} is slow: {slow} ms"));
                self.ends.push((until, End::Fast(machine)));
            }
            10 => {
                let ahead = self.dice.below(JUMP_MILLIS);
                world.machines[machine].ahead_millis.store(ahead, Relaxed);
                world.note(&format!("the clock of node-{machine} is ahead by {ahead} ms"));
            }
            _ => self.change_members(world, machine),
        }
    }

    fn cut_power(&mut self, sim: &mut Sim<'_>, world: &World, machine: usize, until: u64) {
        let of = &world.machines[machine];
        if !of.is_up.load(Relaxed) {
            return;
        }
        world.note(&format!("node-{machine} loses power"));
        world.count("power cuts");
        if self.held.contains(&machine) {
            self.end(sim, world, End::Release(machine));
        }
        // It says no more, not even goodbye.
        self.cut(sim, world, &both_ways(world, machine));
        of.lose_power(&mut self.dice);
        sim.crash(of.name());
        self.ends.push((until, End::PowerOn(machine)));
    }

    fn cut(&mut self, sim: &Sim<'_>, world: &World, pairs: &[(usize, usize)]) {
        for (from, to) in pairs {
            let reasons = self.cuts.entry((*from, *to)).or_default();
            *reasons += 1;
            if *reasons == 1 {
                sim.partition_oneway(world.machines[*from].name(), world.machines[*to].name());
            }
        }
    }

    fn mend(&mut self, sim: &Sim<'_>, world: &World, pairs: &[(usize, usize)]) {
        for pair in pairs {
            let Some(reasons) = self.cuts.get_mut(pair) else { continue };
            *reasons -= 1;
            if *reasons == 0 {
                self.cuts.remove(pair);
                let (from, to) = (&world.machines[pair.0], &world.machines[pair.1]);
                sim.repair_oneway(from.name(), to.name());
            }
        }
    }

    /// One machine, and sometimes another one with it, is cut off from the rest.
    fn part(&mut self, sim: &mut Sim<'_>, world: &World, machine: usize, until: u64) {
        let count = world.machines.len();
        let mate = self.dice.is(1, 3).then(|| (machine + 1) % count);
        let inside = |one: usize| one == machine || Some(one) == mate;
        let pairs: Vec<(usize, usize)> = (0..count)
            .flat_map(|one| (0..count).map(move |other| (one, other)))
            .filter(|(one, other)| inside(*one) != inside(*other))
            .collect();
        if !self.held.is_empty() {
            return;
        }
        world.note(&format!("node-{machine} is cut off, with {mate:?}"));
        world.count("partitions");
        self.cut(sim, world, &pairs);
        self.ends.push((until, End::Repair(pairs)));
    }

    fn part_one_way(&mut self, sim: &mut Sim<'_>, world: &World, machine: usize, until: u64) {
        if !self.held.is_empty() {
            return;
        }
        let speaks = self.dice.is(1, 2);
        world.note(&format!("node-{machine} {} no more", if speaks { "hears" } else { "speaks" }));
        world.count("partitions of one way");
        let mut pairs = both_ways(world, machine);
        pairs.retain(|(from, _)| (*from == machine) != speaks);
        self.cut(sim, world, &pairs);
        self.ends.push((until, End::Repair(pairs)));
    }

    /// As a machine that sleeps: what it says and hears waits, and comes late.
    fn hold(&mut self, sim: &mut Sim<'_>, world: &World, machine: usize, until: u64) {
        if !self.cuts.is_empty() || !self.held.insert(machine) {
            return;
        }
        world.note(&format!("node-{machine} sleeps"));
        world.count("sleeps");
        for other in world.machines.iter().filter(|other| other.number != machine) {
            sim.hold(world.machines[machine].name(), other.name());
        }
        self.ends.push((until, End::Release(machine)));
    }

    /// A node is drained and comes back, or a new one joins.
    fn change_members(&mut self, world: &World, machine: usize) {
        world.count("changes of members");
        if std::mem::take(&mut self.late) && world.machines.len() > FOUNDERS {
            return world.order(FOUNDERS, NodeStatus::Active);
        }
        match self.drained.take() {
            Some(drained) => world.order(drained, NodeStatus::Active),
            None if machine < FOUNDERS => {
                self.drained = Some(machine);
                world.order(machine, NodeStatus::Draining);
            }
            None => {}
        }
    }

    fn end(&mut self, sim: &mut Sim<'_>, world: &World, end: End) {
        match end {
            End::PowerOn(machine) => {
                world.note(&format!("node-{machine} starts"));
                self.mend(sim, world, &both_ways(world, machine));
                sim.bounce(world.machines[machine].name());
            }
            End::Repair(pairs) => {
                world.note("the network is whole");
                self.mend(sim, world, &pairs);
            }
            End::Release(machine) if !self.held.contains(&machine) => {}
            End::Release(machine) => {
                world.note(&format!("node-{machine} wakes up"));
                self.held.remove(&machine);
                for other in world.machines.iter().filter(|other| other.number != machine) {
                    sim.release(world.machines[machine].name(), other.name());
                }
            }
            End::Fast(machine) => world.machines[machine].slow_millis.store(0, Relaxed),
        }
    }
}

/// The ways from a machine to all others, and back.
fn both_ways(world: &World, machine: usize) -> Vec<(usize, usize)> {
    let others = (0..world.machines.len()).filter(|other| *other != machine);
    others.flat_map(|other| [(machine, other), (other, machine)]).collect()
}
