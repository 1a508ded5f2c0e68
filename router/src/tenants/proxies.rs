//! Proxies in front of the router that authenticate clients and name their tenants.

use std::net::IpAddr;

/// The networks whose proxies may name a request's tenant and priority.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrustedProxies(Vec<Network>);

/// A network: an address and the number of its leading bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Network {
    address: IpAddr,
    bits: u8,
}

impl TrustedProxies {
    /// Parses addresses and networks such as `10.0.0.0/8`. The error is the first invalid text.
    pub fn parse(texts: &[String]) -> Result<Self, String> {
        texts
            .iter()
            .map(|text| Network::parse(text).ok_or_else(|| text.clone()))
            .collect::<Result<_, _>>()
            .map(Self)
    }

    pub fn include(&self, peer: IpAddr) -> bool {
        let peer = peer.to_canonical();
        self.0.iter().any(|network| network.includes(peer))
    }
}

impl Network {
    fn parse(text: &str) -> Option<Self> {
        let (address, bits) = match text.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u8>().ok()?)),
            None => (text, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let whole = if address.is_ipv4() { 32 } else { 128 };
        Some(Self { address, bits: bits.unwrap_or(whole) }).filter(|network| network.bits <= whole)
    }

    fn includes(self, peer: IpAddr) -> bool {
        match (self.address, peer) {
            (IpAddr::V4(own), IpAddr::V4(peer)) => {
                shares(u128::from(own.to_bits()) << 96, u128::from(peer.to_bits()) << 96, self.bits)
            }
            (IpAddr::V6(own), IpAddr::V6(peer)) => shares(own.to_bits(), peer.to_bits(), self.bits),
            _ => false,
        }
    }
}

/// Returns whether the first `bits` bits of two addresses are the same.
fn shares(one: u128, other: u128, bits: u8) -> bool {
    (one ^ other).leading_zeros() >= u32::from(bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(networks: &[&str], peer: &str) -> bool {
        let texts: Vec<String> = networks.iter().map(|text| (*text).to_owned()).collect();
        TrustedProxies::parse(&texts).expect("networks").include(peer.parse().expect("an address"))
    }

    #[test]
    fn a_network_has_the_addresses_that_share_its_bits() {
        for (network, peer, expected) in [
            ("10.0.0.0/8", "10.200.3.4", true),
            ("10.0.0.0/8", "11.0.0.1", false),
            ("10.0.0.7", "10.0.0.7", true),
            ("10.0.0.7", "10.0.0.8", false),
            ("10.0.0.0/9", "::ffff:10.1.2.3", true),
            ("0.0.0.0/0", "192.0.2.1", true),
            ("0.0.0.0/0", "2001:db8::1", false),
            ("2001:db8::/32", "2001:db8:ffff::1", true),
            ("2001:db8::/32", "2001:db9::1", false),
            ("::1", "::1", true),
        ] {
            assert_eq!(check(&[network], peer), expected, "{network} {peer}");
        }
        assert!(!check(&[], "127.0.0.1"), "by default there is none");
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "proxy", "10.0.0.0/33", "10.0.0.0/", "::/129", "10.0.0.0/-1"] {
            assert_eq!(TrustedProxies::parse(&[text.to_owned()]), Err(text.to_owned()));
        }
    }
}
