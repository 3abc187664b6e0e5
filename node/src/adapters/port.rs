//! The port of an instance: free, and promised to nobody else on this machine.
//!
//! That nobody listens on a port does not say that nobody will in a moment: nodes that share a machine give ports
//! away at the same time, and looking is listening for a moment too. So a node keeps a name for each port that it
//! gives away, which the kernel knows once per machine and forgets with the node (unix(7), abstract addresses).

use std::{
    io,
    net::{Ipv4Addr, TcpListener},
    ops::RangeInclusive,
    os::{
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr, UnixDatagram},
    },
    sync::atomic::{AtomicU16, Ordering::Relaxed},
};

/// The ports of a node's instances.
pub struct PortRange {
    range: RangeInclusive<u16>,
    next: AtomicU16,
}

/// A port that no node of this machine gives to another instance while this lives.
pub struct Port {
    /// Its number.
    pub number: u16,
    _promise: Option<UnixDatagram>,
}

impl PortRange {
    /// Out of this range, which other nodes of the machine may use too.
    pub fn new(range: RangeInclusive<u16>) -> Self {
        let dice = u16::from_be_bytes(super::system::random_bytes());
        let numbers = u32::from(range.end() - range.start()) + 1;
        let first = range.start() + u16::try_from(u32::from(dice) % numbers).unwrap_or_default();
        Self { range, next: AtomicU16::new(first) }
    }

    /// A port that nobody listens on or has been promised.
    ///
    /// # Errors
    /// When all are taken.
    pub fn take(&self) -> io::Result<Port> {
        let is_ours = |promise: &io::Result<UnixDatagram>| {
            // A machine that knows no such names has no promises either.
            !matches!(promise, Err(error) if error.kind() == io::ErrorKind::AddrInUse)
        };
        // An agent may keep such names too. That must not keep others from being started.
        let free = self.find(is_ours).or_else(|| self.find(|_| true));
        free.ok_or_else(|| {
            let (first, last) = (self.range.start(), self.range.end());
            io::Error::other(format!("all ports of {first}-{last} are taken"))
        })
    }

    fn find(&self, may_have: impl Fn(&io::Result<UnixDatagram>) -> bool) -> Option<Port> {
        let (first, last) = (*self.range.start(), *self.range.end());
        self.range.clone().find_map(|_| {
            let step = |port| Some(if port >= last { first } else { port + 1 });
            let number = self.next.fetch_update(Relaxed, Relaxed, step).unwrap_or(first);
            let promise = promise(number);
            let is_free =
                may_have(&promise) && TcpListener::bind((Ipv4Addr::LOCALHOST, number)).is_ok();
            is_free.then(|| Port { number, _promise: promise.ok() })
        })
    }
}

/// In use if somebody has it.
fn promise(port: u16) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(format!("roost/port/{port}"))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_of_a_machine_promise_each_port_once() {
        let nodes = [PortRange::new(31_000..=31_007), PortRange::new(31_000..=31_007)];
        let taken: Vec<Port> =
            (0..8).map(|n| nodes[n % 2].take().expect("a port is free")).collect();
        let mut numbers: Vec<u16> = taken.iter().map(|port| port.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (31_000..=31_007).collect::<Vec<_>>());
        drop(taken);
        assert!(nodes[0].take().is_ok(), "it is free again");
    }

    #[test]
    fn a_port_that_somebody_listens_on_is_passed_over() {
        let ports = PortRange::new(31_010..=31_011);
        let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 31_010)).expect("it is free");
        assert_eq!(ports.take().map(|port| port.number).ok(), Some(31_011));
    }

    #[test]
    fn names_that_somebody_keeps_do_not_keep_instances_from_starting() {
        let ports = PortRange::new(31_020..=31_021);
        let _kept = [31_020, 31_021].map(|port| promise(port).expect("it is free"));
        assert!(ports.take().is_ok());
    }
}
