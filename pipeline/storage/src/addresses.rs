//! Decides which addresses belong to the public internet: all except those in IANA's special-purpose registries.
//!
//! An address that embeds an IPv4 address is judged by it if packets reach that address (IPv4-mapped, NAT64). Addresses
//! of obsolete mechanisms (IPv4-compatible, 6to4, Teredo) are not public: no public web server needs them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::LazyLock;

use ipnet::{Ipv4Net, Ipv6Net};

/// IPv4 networks outside the public internet.
const NON_PUBLIC_V4: [&str; 17] = [
    "0.0.0.0/8",        // this host
    "10.0.0.0/8",       // private
    "100.64.0.0/10",    // carrier-grade NAT, and metadata of some clouds
    "127.0.0.0/8",      // loopback
    "168.63.129.16/32", // host services of an Azure machine, which return secrets
    "169.254.0.0/16",   // link-local, and metadata of most clouds
    "172.16.0.0/12",    // private
    "192.0.0.0/24",     // protocol assignments, and metadata of Oracle's cloud
    "192.0.2.0/24",     // documentation
    "192.31.196.0/24",  // AS112
    "192.52.193.0/24",  // AMT
    "192.88.99.0/24",   // 6to4 relays
    "192.168.0.0/16",   // private
    "198.18.0.0/15",    // benchmarks
    "198.51.100.0/24",  // documentation
    "203.0.113.0/24",   // documentation
    "224.0.0.0/3",      // multicast, reserved, broadcast
];

/// The network that contains all global unicast IPv6 addresses.
const GLOBAL_V6: &str = "2000::/3";

/// Networks inside [`GLOBAL_V6`] but outside the public internet.
const NON_PUBLIC_V6: [&str; 5] = [
    "2001::/23",         // protocol assignments: Teredo, benchmarks, ORCHID
    "2001:db8::/32",     // documentation
    "2002::/16",         // 6to4
    "2620:4f:8000::/48", // AS112
    "3fff::/20",         // documentation
];

/// NAT64: the last 32 bits are the IPv4 address of the destination.
const NAT64: &str = "64:ff9b::/96";

struct Networks {
    non_public_v4: Vec<Ipv4Net>,
    global_v6: Option<Ipv6Net>,
    non_public_v6: Vec<Ipv6Net>,
    nat64: Option<Ipv6Net>,
}

static NETWORKS: LazyLock<Networks> = LazyLock::new(|| Networks {
    non_public_v4: NON_PUBLIC_V4.iter().filter_map(|n| n.parse().ok()).collect(),
    global_v6: GLOBAL_V6.parse().ok(),
    non_public_v6: NON_PUBLIC_V6.iter().filter_map(|n| n.parse().ok()).collect(),
    nat64: NAT64.parse().ok(),
});

/// Whether an address belongs to the public internet.
pub fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !NETWORKS.non_public_v4.iter().any(|n| n.contains(&address))
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    if let Some(mapped) = address.to_ipv4_mapped() {
        return is_public_v4(mapped);
    }
    if NETWORKS.nat64.is_some_and(|n| n.contains(&address)) {
        let [.., a, b, c, d] = address.octets();
        return is_public_v4(Ipv4Addr::new(a, b, c, d));
    }
    NETWORKS.global_v6.is_some_and(|n| n.contains(&address))
        && !NETWORKS.non_public_v6.iter().any(|n| n.contains(&address))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_network_of_the_tables_is_one() {
        assert_eq!(NETWORKS.non_public_v4.len(), NON_PUBLIC_V4.len());
        assert_eq!(NETWORKS.non_public_v6.len(), NON_PUBLIC_V6.len());
        assert!(NETWORKS.global_v6.is_some() && NETWORKS.nat64.is_some());
    }

    #[test]
    fn addresses_are_distinguished() {
        let private = [
            "0.0.0.0",
            "0.1.2.3",
            "10.0.0.1",
            "10.255.255.255",
            "100.64.0.1",
            "100.100.100.200",
            "100.127.255.255",
            "127.0.0.1",
            "127.255.255.254",
            "168.63.129.16",
            "169.254.169.254",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.192",
            "192.0.2.1",
            "192.88.99.1",
            "192.168.1.1",
            "198.18.0.1",
            "198.19.255.255",
            "198.51.100.7",
            "203.0.113.7",
            "224.0.0.1",
            "239.255.255.250",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::7f00:1",
            "::127.0.0.1",
            "::8.8.8.8",
            "::ffff:127.0.0.1",
            "::ffff:10.0.0.1",
            "::ffff:169.254.169.254",
            "::ffff:0:8.8.8.8",
            "64:ff9b::127.0.0.1",
            "64:ff9b::a9fe:a9fe",
            "64:ff9b:1::8.8.8.8",
            "100::1",
            "2001::1",
            "2001:0:4136:e378:8000:63bf:3fff:fdd2",
            "2001:2::1",
            "2001:10::1",
            "2001:db8::1",
            "2002:7f00:1::1",
            "2002:808:808::1",
            "3fff::1",
            "5f00::1",
            "fc00::1",
            "fd00:ec2::254",
            "fe80::1",
            "fec0::1",
            "ff02::1",
        ];
        let public = [
            "1.1.1.1",
            "8.8.8.8",
            "9.255.255.255",
            "11.0.0.0",
            "100.63.255.255",
            "100.128.0.0",
            "126.255.255.255",
            "128.0.0.0",
            "168.63.129.17",
            "169.253.255.255",
            "172.15.255.255",
            "172.32.0.0",
            "192.0.1.0",
            "192.167.255.255",
            "198.17.255.255",
            "198.20.0.0",
            "223.255.255.255",
            "::ffff:8.8.8.8",
            "64:ff9b::8.8.8.8",
            "2001:4860:4860::8888",
            "2606:4700:4700::1111",
            "2a00:1450:4001:82a::200e",
        ];
        for text in private {
            assert!(!is_public(text.parse().unwrap()), "{text} is not public");
        }
        for text in public {
            assert!(is_public(text.parse().unwrap()), "{text} is public");
        }
    }
}
