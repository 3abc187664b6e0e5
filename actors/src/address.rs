//! Calls without credentials, counted by address. An address has one node that counts it, whichever node
//! is called; the counts go with their node, and a node that can't ask counts for itself.

use std::net::{IpAddr, Ipv6Addr};

use crate::{
    ask::Ask,
    limiter::{Admission, Standing},
    world::World,
};

/// So many at once are no customers: they share one budget.
const CROWD: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);

/// What counts as one address: an IPv6 customer has a whole /64.
pub fn prefix(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => IpAddr::V6((v6.to_bits() >> 64 << 64).into()),
        v4 @ IpAddr::V4(_) => v4,
    }
}

impl World {
    /// Where an address stands as far as this node knows, without counting a call.
    pub fn standing_of_address(&self, address: Option<IpAddr>) -> Standing {
        let limit = self.settings.rates.unauthenticated_per_minute;
        self.addresses.standing(address.map(prefix), limit, self.now())
    }

    /// Counts a call without credentials.
    pub async fn admit_address(&self, address: Option<IpAddr>) -> Admission {
        let Some(address) = address.map(prefix) else {
            return Admission::Allowed(self.standing_of_address(None));
        };
        let (ask, here) = (Ask::CountAddress(address), || self.count_address_here(address));
        self.count(&self.addresses, ("address", address), ask, here).await
    }

    /// Counts a call at whichever node it came in.
    pub(crate) fn count_address_here(&self, address: IpAddr) -> Admission {
        let most = self.settings.rates.unauthenticated_per_minute;
        self.addresses.admit(address, CROWD, most, self.now())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_customer_of_ipv6_is_one_address() {
        let prefix = |text: &str| prefix(text.parse().expect("an address")).to_string();
        assert_eq!(prefix("203.0.113.1"), "203.0.113.1");
        assert_eq!(prefix("::ffff:203.0.113.1"), "203.0.113.1");
        assert_eq!(prefix("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
    }
}
