//! Authentication: certificate, then token, then nobody (cmd/kubelet/app/auth.go:BuildAuthn).
//!
//! A certificate that fails does not stop a token and the other way round, but when nothing succeeds a failure wins over
//! anonymous: an invalid token never becomes system:anonymous.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use http::HeaderMap;
use http::header::{AUTHORIZATION, SEC_WEBSOCKET_PROTOCOL};
use quintlet_kit::clock::Clock;
use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::time::Instant;

use super::User;
use super::cache::{Cache, key};
use super::review::Reviewer;
use super::x509::ClientCa;

/// A subprotocol of this form carries a token, since browsers cannot set headers.
const TOKEN_PROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";
/// A longer token is none: it would only fill the API server's memory.
const MAX_TOKEN: usize = 32 << 10;

/// Finds out who asks.
#[derive(Debug)]
pub struct Authenticator {
    /// For client certificates; none: they say nothing.
    pub ca: Option<Arc<ClientCa>>,
    /// For tokens; none: they say nothing.
    pub tokens: Option<Tokens>,
    /// Requests without credentials are let in.
    pub anonymous: bool,
    /// For the validity of certificates.
    pub clock: Clock,
}

/// Tokens, and what the API server said of them.
#[derive(Debug)]
pub struct Tokens {
    reviewer: Arc<Reviewer>,
    ttl: Duration,
    known: Cache<Option<User>>,
}

impl Tokens {
    /// Asks `reviewer`; an answer counts for `ttl`.
    #[must_use]
    pub fn new(reviewer: Arc<Reviewer>, ttl: Duration) -> Self {
        Self { reviewer, ttl, known: Cache::default() }
    }

    async fn user(&self, token: &str) -> Result<User, Unauthenticated> {
        let key = key([token.as_bytes()]);
        if let Some(known) = self.known.get(&key, Instant::now()) {
            return known.ok_or(Unauthenticated("invalid bearer token".to_owned()));
        }
        let user = self
            .reviewer
            .token(token)
            .await
            .map_err(|error| Unauthenticated(quintlet_kit::error_chain(&error)))?;
        self.known.put(key, user.clone(), Instant::now(), self.ttl);
        user.ok_or(Unauthenticated("invalid bearer token".to_owned()))
    }
}

/// Why nobody is known to ask: for the log, never for the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unauthenticated(pub String);

impl Authenticator {
    /// Who asks.
    ///
    /// # Errors
    /// Nobody who could be let in.
    pub async fn user(
        &self,
        chain: &[CertificateDer<'static>],
        headers: &HeaderMap,
    ) -> Result<User, Unauthenticated> {
        let mut failures = Vec::new();
        if let Some(ca) = self.ca.as_ref().filter(|_| !chain.is_empty()) {
            let now = u64::try_from(self.clock.wall().as_second()).unwrap_or(0);
            match ca.user(chain, UnixTime::since_unix_epoch(Duration::from_secs(now))) {
                Ok(user) => return Ok(user),
                Err(error) => failures.push(quintlet_kit::error_chain(&error)),
            }
        }
        if let Some(tokens) = &self.tokens
            && let Some(token) = token(headers)
        {
            match tokens.user(&token).await {
                Ok(user) => return Ok(user),
                Err(Unauthenticated(why)) => failures.push(why),
            }
        }
        match (failures.is_empty(), self.anonymous) {
            (true, true) => Ok(User::anonymous()),
            (true, false) => Err(Unauthenticated("no credentials".to_owned())),
            (false, _) => Err(Unauthenticated(failures.join("; "))),
        }
    }
}

/// The token of a request, if it has one.
#[must_use]
pub fn token(headers: &HeaderMap) -> Option<String> {
    bearer(headers).or_else(|| {
        let protocols = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|v| v.to_str().ok());
        let encoded =
            protocols.flat_map(|v| v.split(',')).find_map(|p| p.trim().strip_prefix(TOKEN_PROTOCOL))?;
        let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(encoded).ok()?;
        String::from_utf8(bytes).ok().filter(|t| !t.is_empty() && t.len() <= MAX_TOKEN)
    })
}

fn bearer(headers: &HeaderMap) -> Option<String> {
    let mut words = headers.get(AUTHORIZATION)?.to_str().ok()?.split_ascii_whitespace();
    let scheme = words.next()?;
    let token = words.next()?;
    (scheme.eq_ignore_ascii_case("bearer") && token.len() <= MAX_TOKEN).then(|| token.to_owned())
}

/// Takes what says who asks out of a request that is passed on: the runtime must not see it.
pub fn strip(headers: &mut HeaderMap) {
    headers.remove(AUTHORIZATION);
    let kept: Vec<String> = headers
        .get_all(SEC_WEBSOCKET_PROTOCOL)
        .iter()
        .filter_map(|v| v.to_str().ok())
        .flat_map(|v| v.split(','))
        .map(|p| p.trim().to_owned())
        .filter(|p| !p.starts_with(TOKEN_PROTOCOL))
        .collect();
    if headers.contains_key(SEC_WEBSOCKET_PROTOCOL) {
        headers.remove(SEC_WEBSOCKET_PROTOCOL);
        if let Ok(value) = kept.join(", ").parse()
            && !kept.is_empty()
        {
            headers.insert(SEC_WEBSOCKET_PROTOCOL, value);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        list.iter().map(|(n, v)| (http::HeaderName::from_static(n), v.parse().unwrap())).collect()
    }

    #[test]
    fn tokens_come_in_a_header_or_in_a_subprotocol() {
        let encoded = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode("abc.def");
        let protocols = format!("v4.channel.k8s.io, {TOKEN_PROTOCOL}{encoded}");
        for (list, want) in [
            (headers(&[("authorization", "Bearer abc.def")]), Some("abc.def")),
            (headers(&[("authorization", "bearer  abc.def ")]), Some("abc.def")),
            (headers(&[("authorization", "Basic YTpi")]), None),
            (headers(&[("authorization", "Bearer")]), None),
            (headers(&[("sec-websocket-protocol", &protocols)]), Some("abc.def")),
            (headers(&[("sec-websocket-protocol", "base64url.bearer.authorization.k8s.io.!!")]), None),
            (headers(&[]), None),
        ] {
            assert_eq!(token(&list).as_deref(), want, "{list:?}");
        }
        let mut list = headers(&[("authorization", "Bearer x"), ("sec-websocket-protocol", &protocols)]);
        strip(&mut list);
        assert_eq!(list, headers(&[("sec-websocket-protocol", "v4.channel.k8s.io")]));
    }

    proptest! {
        #[test]
        fn no_header_makes_it_panic_and_no_token_is_left_for_the_runtime(
            auth in proptest::collection::vec(0x20u8..=0xff, 0..80),
            protocols in "[ ,.a-z0-9]{0,30}(base64url\\.bearer\\.authorization\\.k8s\\.io\\.[A-Za-z0-9_=-]{0,40})?[ ,a-z]{0,9}",
        ) {
            let mut list = HeaderMap::new();
            if let Ok(value) = http::HeaderValue::from_bytes(&auth) {
                list.insert(AUTHORIZATION, value);
            }
            list.insert(SEC_WEBSOCKET_PROTOCOL, protocols.parse().unwrap());
            let _ = token(&list);
            strip(&mut list);
            prop_assert_eq!(token(&list), None);
        }

        #[test]
        fn a_token_is_read_as_it_was_sent(sent in "[!-~]{1,200}", scheme in "(?i)bearer", blanks in " {1,3}") {
            let mut list = HeaderMap::new();
            list.insert(AUTHORIZATION, format!("{scheme}{blanks}{sent}").parse().unwrap());
            prop_assert_eq!(token(&list), Some(sent.clone()));
            let encoded = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(&sent);
            let mut list = HeaderMap::new();
            list.append(SEC_WEBSOCKET_PROTOCOL, "v5.channel.k8s.io".parse().unwrap());
            list.append(SEC_WEBSOCKET_PROTOCOL, format!("{TOKEN_PROTOCOL}{encoded}").parse().unwrap());
            prop_assert_eq!(token(&list), Some(sent));
            strip(&mut list);
            prop_assert_eq!(list, headers(&[("sec-websocket-protocol", "v5.channel.k8s.io")]));
        }

        /// Any bytes that a header can hold: a token only comes from a bearer, and is a part of what was sent.
        #[test]
        fn only_a_bearer_has_a_token(value in proptest::collection::vec(any::<u8>(), 0..80)) {
            let mut list = HeaderMap::new();
            if let Ok(sent) = http::HeaderValue::from_bytes(&value) {
                list.insert(AUTHORIZATION, sent);
            }
            if let Some(token) = token(&list) {
                let sent = String::from_utf8(value).unwrap();
                let mut words = sent.split_ascii_whitespace();
                prop_assert!(words.next().is_some_and(|w| w.eq_ignore_ascii_case("bearer")), "{}", sent);
                prop_assert_eq!(words.next(), Some(token.as_str()));
            }
        }
    }
}
