//! Finds the client's address in the header of a trusted proxy.
//!
//! ```text
//!   client 192.0.2.7 ─► 10.0.0.2 ─► 10.0.0.1 ─► service       trusted_proxies: [10.0.0.0/8]
//!   X-Forwarded-For: 6.6.6.6, 192.0.2.7, 10.0.0.2             read from the right, past the trusted ones: 192.0.2.7
//! ```
//!
//! Entries that the client wrote itself are on the left, so they are never reached. The header of any other peer is
//! ignored.

use std::net::{IpAddr, SocketAddr};

use axum::http::HeaderMap;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// The header in which a trusted proxy names the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProxyHeader {
    /// `X-Forwarded-For`.
    XForwardedFor,
    /// `Forwarded` (RFC 7239).
    Forwarded,
}

/// The trusted proxies.
#[derive(Debug, Clone)]
pub struct Proxies {
    trusted: Vec<IpNet>,
    header: ProxyHeader,
}

/// Parses a network, or an address as a network of one.
pub fn parse_network(text: &str) -> Option<IpNet> {
    text.parse().ok().or_else(|| text.parse::<IpAddr>().ok().map(IpNet::from))
}

impl Proxies {
    /// Trusts these addresses and networks, which must be valid, to name clients in this header.
    pub fn new(trusted: &[String], header: ProxyHeader) -> Self {
        Self { trusted: trusted.iter().filter_map(|text| parse_network(text)).collect(), header }
    }

    /// Whether this address may name the client that it forwards for.
    pub fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.trusted.iter().any(|network| network.contains(&address))
    }

    /// The client's address: the nearest one that is not a trusted proxy. If a trusted proxy names no valid address,
    /// the proxy's own.
    pub fn client_address(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut nearest = peer.to_canonical();
        let name = match self.header {
            ProxyHeader::XForwardedFor => "x-forwarded-for",
            ProxyHeader::Forwarded => "forwarded",
        };
        let lines: Vec<_> = headers.get_all(name).iter().collect();
        // several header lines form one list
        for line in lines.into_iter().rev() {
            let Ok(text) = line.to_str() else { return nearest };
            for entry in text.rsplit(',') {
                if !self.trusts(nearest) {
                    return nearest;
                }
                let entry_address = match self.header {
                    ProxyHeader::XForwardedFor => Some(entry),
                    ProxyHeader::Forwarded => forwarded_for(entry),
                };
                let Some(address) = entry_address.and_then(parse_address) else { return nearest };
                nearest = address;
            }
        }
        nearest
    }
}

/// The value of `for` in `for=192.0.2.7;proto=https`.
fn forwarded_for(entry: &str) -> Option<&str> {
    let mut pairs = entry.split(';').filter_map(|pair| pair.split_once('='));
    let (_, value) = pairs.find(|(key, _)| key.trim().eq_ignore_ascii_case("for"))?;
    Some(value.trim().trim_matches('"'))
}

/// `192.0.2.7`, `192.0.2.7:1234`, `2001:db8::7`, `[2001:db8::7]`, `[2001:db8::7]:1234`.
fn parse_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let with_port = || text.parse::<SocketAddr>().ok().map(|a| a.ip());
    let in_brackets = || text.strip_prefix('[')?.strip_suffix(']')?.parse().ok();
    text.parse().ok().or_else(with_port).or_else(in_brackets).map(|ip: IpAddr| ip.to_canonical())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(header: ProxyHeader, peer: &str, lines: &[(&'static str, &str)]) -> String {
        let trusted_proxies = vec!["10.0.0.0/8".into(), "fd00::1".into(), "127.0.0.1".into()];
        let proxies = Proxies::new(&trusted_proxies, header);
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().unwrap());
        }
        proxies.client_address(peer.parse().unwrap(), &headers).to_string()
    }

    #[test]
    fn the_client_is_the_nearest_that_is_not_trusted() {
        const X: &str = "x-forwarded-for";
        for (expected, peer, lines) in [
            // the peer is not trusted: the header may be forged
            ("192.0.2.1", "192.0.2.1", &[(X, "6.6.6.6")][..]),
            ("192.0.2.1", "::ffff:192.0.2.1", &[(X, "6.6.6.6")]),
            ("10.0.0.1", "10.0.0.1", &[]),
            ("192.0.2.7", "10.0.0.1", &[(X, "192.0.2.7")]),
            ("192.0.2.7", "::ffff:10.0.0.1", &[(X, "192.0.2.7")]),
            ("192.0.2.7", "127.0.0.1", &[(X, "6.6.6.6, 192.0.2.7, 10.0.0.2")]),
            ("192.0.2.7", "10.0.0.1", &[(X, "6.6.6.6"), (X, "192.0.2.7 ,10.0.0.2"), (X, "10.0.0.3")]),
            ("192.0.2.7", "10.0.0.1", &[(X, "192.0.2.7:4711")]),
            ("2001:db8::7", "fd00::1", &[(X, "[2001:db8::7]:4711")]),
            ("2001:db8::7", "fd00::1", &[(X, "6.6.6.6, [2001:db8::7]")]),
            ("fd00::2", "fd00::1", &[(X, "6.6.6.6, fd00::2")]),
            ("192.0.2.7", "10.0.0.1", &[(X, "::ffff:192.0.2.7")]),
            // all entries are trusted: the leftmost one
            ("10.0.0.9", "10.0.0.1", &[(X, "10.0.0.9, 10.0.0.2")]),
            // an invalid entry ends the search
            ("10.0.0.2", "10.0.0.1", &[(X, "6.6.6.6, unknown, 10.0.0.2")]),
            ("10.0.0.1", "10.0.0.1", &[(X, "6.6.6.6, ")]),
            ("10.0.0.1", "10.0.0.1", &[(X, "")]),
            // the proxy does not set the other header
            ("10.0.0.1", "10.0.0.1", &[("forwarded", "for=6.6.6.6")]),
        ] {
            assert_eq!(client(ProxyHeader::XForwardedFor, peer, lines), expected, "{peer} {lines:?}");
        }
        const F: &str = "forwarded";
        for (expected, lines) in [
            ("192.0.2.7", &[(F, "for=6.6.6.6, for=192.0.2.7;proto=https;by=10.0.0.1")][..]),
            ("2001:db8::7", &[(F, "proto=https; For=\"[2001:db8::7]:4711\"")]),
            ("192.0.2.7", &[(F, "for=192.0.2.7"), (F, "for=10.0.0.2")]),
            // a quote that the client left open hides no later entry
            ("192.0.2.7", &[(F, "for=\"6.6.6.6, for=192.0.2.7")]),
            ("10.0.0.1", &[(F, "for=6.6.6.6, for=_hidden")]),
            ("10.0.0.1", &[(F, "proto=https")]),
            ("10.0.0.1", &[(X, "6.6.6.6")]),
        ] {
            assert_eq!(client(ProxyHeader::Forwarded, "10.0.0.1", lines), expected, "{lines:?}");
        }
    }
}
