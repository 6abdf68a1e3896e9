//! Authentication and authorization: bearer tokens, and protection against other web sites.
//!
//! The service sets no cookies, so a browser sends no credentials by itself. On loopback, where a token may not be
//! needed, another site's page could still reach the service through a local user's browser. So the service refuses
//! requests whose `Host` is not its own (a name rebound to 127.0.0.1), and requests that the browser marks as
//! cross-site.

use std::net::{IpAddr, SocketAddr};

use axum::http::{HeaderMap, HeaderName, StatusCode, Uri, header};

use super::problem::{ApiResult, ProblemDetails};
use crate::config::{Config, is_loopback};
use crate::store::tokens::{Holder, Scope};

/// The sender of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Caller {
    /// The user; `None` if the request has no token but needs one.
    pub holder: Option<Holder>,
    /// The name under which the rate limits count requests.
    pub rate_key: String,
    /// Whether the connection has a slot reserved for administrators.
    pub has_reserved_slot: bool,
}

/// The user on loopback without a token.
pub const LOCAL_USER: &str = "local";

impl Caller {
    /// The user, if they have this scope.
    ///
    /// # Errors
    /// 401 without a valid token, 403 without the scope.
    pub fn require(&self, scope: Scope) -> ApiResult<&Holder> {
        let Some(holder) = &self.holder else {
            let detail =
                "this request needs a token: Authorization: Bearer sh_… (`stillhouse token create` creates one)";
            return Err(ProblemDetails::new(StatusCode::UNAUTHORIZED, detail));
        };
        if !holder.scopes.contains(&scope) && !holder.scopes.contains(&Scope::Admin) {
            let has: Vec<&str> = holder.scopes.iter().map(|s| s.name()).collect();
            let detail = format!("this request needs the scope {}; the token has {}", scope.name(), has.join(", "));
            return Err(ProblemDetails::new(StatusCode::FORBIDDEN, detail));
        }
        Ok(holder)
    }

    /// The user whose jobs the caller may see: `None` for all jobs, with `read`; the caller with `submit` alone.
    ///
    /// # Errors
    /// As [`Caller::require`].
    pub fn visible_user(&self) -> ApiResult<Option<&str>> {
        match (self.require(Scope::Read), &self.holder) {
            (Ok(_), _) => Ok(None),
            (Err(_), Some(holder)) if holder.scopes.contains(&Scope::Submit) => Ok(Some(&holder.user)),
            (Err(problem), _) => Err(problem),
        }
    }

    /// The user, if they may change a job of `owner`.
    ///
    /// # Errors
    /// As [`Caller::require`].
    pub fn require_owner(&self, owner: &str) -> ApiResult<&Holder> {
        let holder = self.require(Scope::Submit)?;
        if holder.user != owner && !holder.scopes.contains(&Scope::Admin) {
            if self.visible_user()?.is_some() {
                return Err(not_own_job());
            }
            let detail = format!("the job belongs to {owner}; this request needs the scope admin");
            return Err(ProblemDetails::new(StatusCode::FORBIDDEN, detail));
        }
        Ok(holder)
    }
}

/// The refusal of a caller who may see only their own jobs; the same whether the job exists or not.
pub fn not_own_job() -> ProblemDetails {
    let detail = "a token with only the scope submit can access its own user's jobs; other jobs need the scope read";
    ProblemDetails::new(StatusCode::FORBIDDEN, detail)
}

/// The user on loopback, with every scope.
pub fn local_user() -> Holder {
    Holder { user: LOCAL_USER.to_owned(), scopes: vec![Scope::Read, Scope::Submit, Scope::Admin], token: None }
}

/// The token of a request.
///
/// # Errors
/// 401 when the `Authorization` header holds no bearer token.
pub fn bearer_token(headers: &HeaderMap) -> ApiResult<Option<&str>> {
    let refused = || ProblemDetails::new(StatusCode::UNAUTHORIZED, "the Authorization header holds no bearer token");
    let mut given = headers.get_all(header::AUTHORIZATION).iter();
    let Some(value) = given.next() else { return Ok(None) };
    if given.next().is_some() {
        return Err(refused());
    }
    let text = value.to_str().map_err(|_| refused())?;
    let (scheme, token) = text.split_once(' ').ok_or_else(refused)?;
    if scheme.eq_ignore_ascii_case("bearer") && !token.trim().is_empty() {
        Ok(Some(token.trim()))
    } else {
        Err(refused())
    }
}

const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
const SEC_FETCH_MODE: HeaderName = HeaderName::from_static("sec-fetch-mode");

/// Refuses requests that another web site makes a browser send. Links to the web page itself may come from any site.
///
/// # Errors
/// 421 for a foreign `Host`, 403 for another site, 400 without a `Host` or with several.
pub fn check_origin(config: &Config, local: SocketAddr, headers: &HeaderMap, page: bool) -> ApiResult<()> {
    let text = |name: HeaderName| headers.get(name).map(|v: &axum::http::HeaderValue| v.to_str().unwrap_or("?"));
    let Some(host) = text(header::HOST) else {
        return Err(ProblemDetails::bad_request("the request has no Host header"));
    };
    // a proxy may have used another one than this service (RFC 9112, section 3.2)
    if headers.get_all(header::HOST).iter().count() > 1 {
        return Err(ProblemDetails::bad_request("the request has several Host headers; valid: one"));
    }
    if !is_own_host(config, local, host) {
        let detail =
            "the Host header names another server; this server's names are listed under `hosts` in its configuration";
        return Err(ProblemDetails::new(StatusCode::MISDIRECTED_REQUEST, detail));
    }
    let cross_site = || ProblemDetails::new(StatusCode::FORBIDDEN, "requests from other web sites are refused");
    let followed = page && text(SEC_FETCH_MODE) == Some("navigate");
    if matches!(text(SEC_FETCH_SITE), Some("cross-site" | "same-site")) && !followed {
        return Err(cross_site());
    }
    if let Some(origin) = text(header::ORIGIN) {
        let origin: Uri = origin.parse().map_err(|_| cross_site())?;
        if !origin.authority().is_some_and(|a| a.as_str().eq_ignore_ascii_case(host)) {
            return Err(cross_site());
        }
    }
    Ok(())
}

fn is_own_host(config: &Config, local: SocketAddr, host: &str) -> bool {
    let (name, port) = split_host(host);
    let port_fits = port.is_none_or(|p| p == local.port());
    let bare = name.trim_start_matches('[').trim_end_matches(']');
    let by_address = bare
        .parse::<IpAddr>()
        .is_ok_and(|ip| ip == local.ip() || ip == config.listen.ip() || (is_loopback(ip) && is_loopback(local.ip())));
    let by_name = bare.eq_ignore_ascii_case("localhost") && is_loopback(local.ip());
    // behind a proxy, neither the name nor the port is this machine's
    let listed = config.hosts.iter().any(|own| own.eq_ignore_ascii_case(host) || own.eq_ignore_ascii_case(name));
    listed || (port_fits && (by_address || by_name))
}

fn split_host(host: &str) -> (&str, Option<u16>) {
    match host.rsplit_once(':') {
        Some((name, port)) if !name.contains(':') || name.ends_with(']') => (name, Some(port.parse().unwrap_or(0))),
        _ => (host, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status_of(config: &Config, pairs: &[(&'static str, &str)]) -> u16 {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, value.parse().unwrap());
        }
        let local = "127.0.0.1:7373".parse().unwrap();
        check_origin(config, local, &headers, false).map_or_else(|p| p.status, |()| 200)
    }

    #[test]
    fn other_sites_and_rebound_names_are_refused() {
        let config = Config { hosts: vec!["shards.example.org".into()], ..Config::default() };
        for (expected, headers) in [
            (200, &[("host", "127.0.0.1:7373")][..]),
            (200, &[("host", "localhost:7373"), ("origin", "http://localhost:7373")]),
            (200, &[("host", "[::1]:7373")]),
            (200, &[("host", "shards.example.org"), ("origin", "https://shards.example.org")]),
            (400, &[]),
            (421, &[("host", "evil.example")]),
            (421, &[("host", "127.0.0.1:80")]),
            (421, &[("host", "10.1.2.3:7373")]),
            (421, &[("host", "127.0.0.1.evil.example:7373")]),
            (403, &[("host", "localhost:7373"), ("origin", "http://evil.example")]),
            (403, &[("host", "localhost:7373"), ("origin", "null")]),
            (403, &[("host", "localhost:7373"), ("origin", "http://localhost:8080")]),
            (403, &[("host", "localhost:7373"), ("sec-fetch-site", "cross-site")]),
            (200, &[("host", "localhost:7373"), ("sec-fetch-site", "same-origin")]),
            (200, &[("host", "localhost:7373"), ("sec-fetch-site", "none")]),
        ] {
            assert_eq!(status_of(&config, headers), expected, "{headers:?}");
        }
    }

    #[test]
    fn tokens_are_read_from_one_header() {
        let token = |values: &[&str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(header::AUTHORIZATION, value.parse().unwrap());
            }
            bearer_token(&headers).map(|t| t.map(str::to_owned)).map_err(|p| p.status)
        };
        assert_eq!(token(&[]), Ok(None));
        assert_eq!(token(&["Bearer sh_a_b"]), Ok(Some("sh_a_b".into())));
        assert_eq!(token(&["bearer  sh_a_b"]), Ok(Some("sh_a_b".into())));
        for wrong in [&["Basic YQ=="][..], &["Bearer"], &["Bearer "], &["Bearer a", "Bearer b"]] {
            assert_eq!(token(wrong), Err(401), "{wrong:?}");
        }
    }

    #[test]
    fn scopes_and_owners() {
        let caller = |user: &str, scopes: &[Scope]| Caller {
            holder: Some(Holder { user: user.into(), scopes: scopes.to_vec(), token: None }),
            rate_key: user.into(),
            has_reserved_slot: false,
        };
        let status = |answer: ApiResult<&Holder>| answer.map_or_else(|p| p.status, |_| 200);
        let nobody = Caller { holder: None, rate_key: "1.2.3.4".into(), has_reserved_slot: false };
        assert_eq!(status(nobody.require(Scope::Read)), 401);
        let reader = caller("r", &[Scope::Read]);
        assert_eq!((status(reader.require(Scope::Read)), status(reader.require(Scope::Submit))), (200, 403));
        let user = caller("u", &[Scope::Read, Scope::Submit]);
        assert_eq!(
            (status(user.require_owner("u")), status(user.require_owner("v")), status(reader.require_owner("r"))),
            (200, 403, 403)
        );
        assert_eq!(status(caller("a", &[Scope::Submit, Scope::Admin]).require_owner("v")), 200);
        // with submit alone a user sees their own jobs, and does not even learn the owner of others
        let visible_user = |caller: &Caller| caller.visible_user().map(|s| s.map(str::to_owned)).map_err(|p| p.status);
        let writer = caller("w", &[Scope::Submit]);
        assert_eq!((visible_user(&nobody), visible_user(&reader), visible_user(&user)), (Err(401), Ok(None), Ok(None)));
        assert_eq!(visible_user(&writer), Ok(Some("w".into())));
        assert_eq!(visible_user(&caller("a", &[Scope::Admin])), Ok(None));
        assert_eq!(writer.require_owner("victor").unwrap_err().detail, not_own_job().detail);
    }
}
