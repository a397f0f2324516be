//! Authentication: by client certificate, then by bearer token, else anonymous
//! (`cmd/kubelet/app: BuildAuthn`).
//!
//! If a certificate is invalid, a token may still authenticate the request, and vice versa. If both fail, the
//! request is not anonymous: an invalid token never becomes `system:anonymous`.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use http::HeaderMap;
use http::header::{AUTHORIZATION, CONNECTION, HeaderName, SEC_WEBSOCKET_PROTOCOL, UPGRADE};
use quintlet_kit::clock::Clock;
use rustls::pki_types::{CertificateDer, UnixTime};
use tokio::time::Instant;

use crate::cache::Cache;
use crate::digest;
use crate::limits::{Client, Limits, Network, Slots};
use crate::review::Reviewer;
use crate::user::User;
use crate::x509::{ClientCa, X509Error};

/// Prefix of a WebSocket subprotocol that carries a token, since browsers cannot set headers.
const TOKEN_PROTOCOL: &str = "base64url.bearer.authorization.k8s.io.";
/// Maximum size of a token. A longer one would only use memory of the API server.
const MAX_TOKEN: usize = 32 << 10;

/// Authenticates requests.
#[derive(Debug)]
pub struct Authenticator {
    /// Verifies client certificates; none: they are ignored.
    pub ca: Option<Arc<ClientCa>>,
    /// Authenticates bearer tokens; none: they are ignored.
    pub tokens: Option<Tokens>,
    /// Requests without credentials are admitted as anonymous.
    pub anonymous: bool,
    /// Time at which certificates have to be valid.
    pub clock: Clock,
}

/// Authenticates tokens by TokenReviews, with a cache.
#[derive(Debug)]
pub struct Tokens {
    reviewer: Arc<Reviewer>,
    ttl: Duration,
    known: Cache<Option<User>>,
    waiting: Slots<Network>,
    limits: Limits,
}

impl Tokens {
    /// Creates an authenticator that caches results for `ttl`, and bounds the requests that wait for a
    /// review.
    #[must_use]
    pub fn new(reviewer: Arc<Reviewer>, ttl: Duration, limits: Limits) -> Self {
        Self { reviewer, ttl, known: Cache::default(), waiting: Slots::default(), limits }
    }

    async fn user(&self, token: &str, network: Network) -> Result<User, AuthenticationError> {
        let invalid = || AuthenticationError::Invalid("invalid bearer token".to_owned());
        let key = digest::of_parts([token.as_bytes()]);
        if let Some(known) = self.known.get(&key, Instant::now()) {
            return known.ok_or_else(invalid);
        }
        let _turn =
            self.waiting.enter(network, self.limits.reviews).map_err(|_| AuthenticationError::Busy)?;
        let user = self
            .reviewer
            .token(token)
            .await
            .map_err(|error| AuthenticationError::Invalid(quintlet_kit::error_chain(&error)))?;
        self.known.put(key, user.clone(), Instant::now(), self.ttl);
        user.ok_or_else(invalid)
    }
}

/// A user, with the client whose share the user's requests use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The user that requests are authorized as.
    pub user: User,
    /// The owner of the share of connections and requests.
    pub client: Client,
}

impl Identity {
    fn certificate(user: User) -> Self {
        Self { client: Client::Certificate(user.name.clone()), user }
    }

    fn token(user: User) -> Self {
        Self { client: Client::Token(user.name.clone()), user }
    }
}

/// The reason why a request is not authenticated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AuthenticationError {
    /// The credentials are missing or invalid. The message is for the log, not for the client.
    Invalid(String),
    /// Too many requests wait for a TokenReview.
    Busy,
}

impl Authenticator {
    /// Returns the client of a certificate chain, or none if it is empty or not valid.
    #[must_use]
    pub fn certified(&self, chain: &[CertificateDer<'static>]) -> Option<Client> {
        Some(Identity::certificate(self.of_chain(chain)?.ok()?).client)
    }

    /// Verifies a certificate chain. Returns none without one, or if certificates are ignored.
    fn of_chain(&self, chain: &[CertificateDer<'static>]) -> Option<Result<User, X509Error>> {
        let ca = self.ca.as_ref().filter(|_| !chain.is_empty())?;
        let now = u64::try_from(self.clock.wall().as_second()).unwrap_or(0);
        Some(ca.user(chain, UnixTime::since_unix_epoch(Duration::from_secs(now))))
    }

    /// Returns the user of a request.
    ///
    /// # Errors
    /// Fails if the credentials are missing or invalid.
    pub async fn identity(
        &self,
        chain: &[CertificateDer<'static>],
        headers: &HeaderMap,
        network: Network,
    ) -> Result<Identity, AuthenticationError> {
        let mut failures = Vec::new();
        match self.of_chain(chain) {
            None => {}
            Some(Ok(user)) => return Ok(Identity::certificate(user)),
            Some(Err(error)) => failures.push(quintlet_kit::error_chain(&error)),
        }
        match (&self.tokens, credential(headers)) {
            (None, _) | (_, Credential::Absent) => {}
            (Some(_), Credential::Invalid(why)) => failures.push(why.to_owned()),
            (Some(tokens), Credential::Token(token)) => match tokens.user(&token, network).await {
                Ok(user) => return Ok(Identity::token(user)),
                Err(AuthenticationError::Invalid(why)) => failures.push(why),
                Err(AuthenticationError::Busy) => return Err(AuthenticationError::Busy),
            },
        }
        match (failures.is_empty(), self.anonymous) {
            (true, true) => Ok(Identity { user: User::anonymous(), client: Client::Anonymous(network) }),
            (true, false) => Err(AuthenticationError::Invalid("no credentials".to_owned())),
            (false, _) => Err(AuthenticationError::Invalid(failures.join("; "))),
        }
    }
}

/// The token of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Credential {
    /// The request has no bearer token, or an empty one.
    Absent,
    /// A token that cannot be valid, and the reason.
    Invalid(&'static str),
    /// A bearer token, which is not verified yet.
    Token(String),
}

/// Returns the token in the Authorization header or, of a WebSocket client, in a subprotocol.
#[must_use]
pub fn credential(headers: &HeaderMap) -> Credential {
    match bearer(headers) {
        Credential::Absent if is_websocket(headers) => subprotocol(headers),
        found => found,
    }
}

fn is_websocket(headers: &HeaderMap) -> bool {
    let has = |name: HeaderName, word: &str| {
        let values = headers.get_all(name).into_iter().filter_map(|v| v.to_str().ok());
        values.flat_map(|v| v.split(',')).any(|w| w.trim().eq_ignore_ascii_case(word))
    };
    has(CONNECTION, "upgrade") && has(UPGRADE, "websocket")
}

fn bearer(headers: &HeaderMap) -> Credential {
    let Some(value) = headers.get(AUTHORIZATION) else { return Credential::Absent };
    let mut words = value.as_bytes().split(u8::is_ascii_whitespace).filter(|w| !w.is_empty());
    if !words.next().is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"bearer")) {
        return Credential::Absent;
    }
    words.next().map_or(Credential::Absent, token)
}

fn subprotocol(headers: &HeaderMap) -> Credential {
    let protocols = headers.get_all(SEC_WEBSOCKET_PROTOCOL).iter().filter_map(|v| v.to_str().ok());
    let encoded = protocols.flat_map(|v| v.split(',')).find_map(|p| p.trim().strip_prefix(TOKEN_PROTOCOL));
    match encoded.map(|e| base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(e)) {
        None => Credential::Absent,
        Some(Ok(bytes)) => token(&bytes),
        Some(Err(_)) => Credential::Invalid("the token in the subprotocol is not base64"),
    }
}

fn token(bytes: &[u8]) -> Credential {
    match std::str::from_utf8(bytes) {
        Ok("") => Credential::Absent,
        Ok(token) if token.len() <= MAX_TOKEN => Credential::Token(token.to_owned()),
        Ok(_) => Credential::Invalid("the token is too long"),
        Err(_) => Credential::Invalid("the token is not UTF-8"),
    }
}

/// Removes credentials from a request that is forwarded to the runtime.
pub fn remove_credentials(headers: &mut HeaderMap) {
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

    fn websocket(protocols: &[&str]) -> HeaderMap {
        let mut list = headers(&[("connection", "keep-alive, Upgrade"), ("upgrade", "websocket")]);
        for protocol in protocols {
            list.append(SEC_WEBSOCKET_PROTOCOL, protocol.parse().unwrap());
        }
        list
    }

    #[test]
    fn a_token_comes_from_a_header_or_a_subprotocol_and_an_invalid_one_is_never_absent() {
        let encode = |bytes: &[u8]| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes);
        let protocols = format!("v4.channel.k8s.io, {TOKEN_PROTOCOL}{}", encode(b"abc.def"));
        let token = || Credential::Token("abc.def".to_owned());
        let long = "x".repeat(MAX_TOKEN + 1);
        let too_long = Credential::Invalid("the token is too long");
        for (list, want) in [
            (headers(&[("authorization", "Bearer abc.def")]), token()),
            (headers(&[("authorization", "bearer  abc.def ")]), token()),
            (headers(&[("authorization", "Basic YTpi")]), Credential::Absent),
            (headers(&[("authorization", "Bearer")]), Credential::Absent),
            (headers(&[("authorization", &format!("Bearer {long}"))]), too_long.clone()),
            (websocket(&[&protocols]), token()),
            (headers(&[("sec-websocket-protocol", &protocols)]), Credential::Absent),
            (
                websocket(&["base64url.bearer.authorization.k8s.io.!!"]),
                Credential::Invalid("the token in the subprotocol is not base64"),
            ),
            (websocket(&["base64url.bearer.authorization.k8s.io."]), Credential::Absent),
            (
                websocket(&[&format!("{TOKEN_PROTOCOL}{}", encode(b"\xff\xfe"))]),
                Credential::Invalid("the token is not UTF-8"),
            ),
            (websocket(&[&format!("{TOKEN_PROTOCOL}{}", encode(long.as_bytes()))]), too_long),
            (headers(&[]), Credential::Absent),
        ] {
            assert_eq!(credential(&list), want, "{list:?}");
        }
        let mut no_text = HeaderMap::new();
        no_text.insert(AUTHORIZATION, http::HeaderValue::from_bytes(b"Bearer \xff").unwrap());
        assert_eq!(credential(&no_text), Credential::Invalid("the token is not UTF-8"));
        let mut list = headers(&[("authorization", "Bearer x"), ("sec-websocket-protocol", &protocols)]);
        remove_credentials(&mut list);
        assert_eq!(list, headers(&[("sec-websocket-protocol", "v4.channel.k8s.io")]));
    }

    proptest! {
        #[test]
        fn no_header_causes_a_panic_and_no_token_is_forwarded_to_the_runtime(
            auth in proptest::collection::vec(0x20u8..=0xff, 0..80),
            protocols in "[ ,.a-z0-9]{0,30}(base64url\\.bearer\\.authorization\\.k8s\\.io\\.[A-Za-z0-9_=-]{0,40})?[ ,a-z]{0,9}",
        ) {
            let mut list = websocket(&[&protocols]);
            if let Ok(value) = http::HeaderValue::from_bytes(&auth) {
                list.insert(AUTHORIZATION, value);
            }
            let _ = credential(&list);
            remove_credentials(&mut list);
            prop_assert_eq!(credential(&list), Credential::Absent);
        }

        #[test]
        fn a_token_is_parsed_to_its_original_value(sent in "[!-~]{1,200}", scheme in "(?i)bearer", blanks in " {1,3}") {
            let mut list = HeaderMap::new();
            list.insert(AUTHORIZATION, format!("{scheme}{blanks}{sent}").parse().unwrap());
            prop_assert_eq!(credential(&list), Credential::Token(sent.clone()));
            let encoded = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(&sent);
            let mut list = websocket(&["v5.channel.k8s.io", &format!("{TOKEN_PROTOCOL}{encoded}")]);
            prop_assert_eq!(credential(&list), Credential::Token(sent));
            remove_credentials(&mut list);
            prop_assert_eq!(list, websocket(&["v5.channel.k8s.io"]));
        }

        /// For any bytes in the header: a token only follows `bearer`, and is a part of the header.
        #[test]
        fn only_a_bearer_header_has_a_token(value in proptest::collection::vec(any::<u8>(), 0..80)) {
            let mut list = HeaderMap::new();
            if let Ok(sent) = http::HeaderValue::from_bytes(&value) {
                list.insert(AUTHORIZATION, sent);
            }
            if let Credential::Token(token) = credential(&list) {
                let sent = String::from_utf8_lossy(&value);
                let mut words = sent.split_ascii_whitespace();
                prop_assert!(words.next().is_some_and(|w| w.eq_ignore_ascii_case("bearer")), "{}", sent);
                prop_assert_eq!(words.next(), Some(token.as_str()));
            }
        }
    }
}
