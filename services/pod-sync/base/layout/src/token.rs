//! Service account tokens and their refresh (`pkg/kubelet/token`).

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use jiff::{SignedDuration, Timestamp};
use parking_lot::Mutex;

const DAY: SignedDuration = SignedDuration::from_hours(24);

/// Identity of a token, the key of the cache.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TokenKey {
    /// Namespace of the service account and of the pod.
    pub namespace: String,
    /// Name of the service account.
    pub service_account: String,
    /// Audiences; empty for that of the API server.
    pub audiences: Vec<String>,
    /// Requested lifetime, in seconds.
    pub expiration_seconds: i64,
    /// Pod that the token is bound to.
    pub pod_name: String,
    /// UID of that pod.
    pub pod_uid: String,
}

/// An issued token, which is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Token {
    /// The token itself, a credential.
    pub token: String,
    /// End of its validity, by the clock of the API server.
    pub expires: Timestamp,
    /// Granted lifetime, in seconds.
    pub expiration_seconds: i64,
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token").field("expires", &self.expires).finish_non_exhaustive()
    }
}

impl Token {
    fn needs_refresh(&self, now: Timestamp, jitter: Duration) -> bool {
        let jitter = SignedDuration::try_from(jitter).unwrap_or(SignedDuration::ZERO);
        let life = SignedDuration::from_secs(self.expiration_seconds);
        // Both values come from the API server. If their difference overflows, the refresh is due at once or
        // never.
        let left = now.duration_until(self.expires);
        let age = life.saturating_sub(left);
        let fifth = life.checked_div(5).unwrap_or(SignedDuration::ZERO);
        age > DAY.saturating_sub(jitter) || left < fifth.saturating_add(jitter)
    }
}

/// There is no token.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TokenError {
    /// The request failed, with the API server's message.
    #[error("{0}")]
    Api(String),
    /// The response of the API server has no token.
    #[error("the API server gave no token")]
    Missing,
    /// There is no API server.
    #[error("cannot use TokenManager when kubelet is in standalone mode")]
    Standalone,
}

/// The cache has no valid token. The texts are the kubelet's, with the cause: they become events.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoValidToken {
    /// The cache has no token, and the request for one failed.
    #[error("failed to fetch token: {0}")]
    Fetch(TokenError),
    /// The cached token has expired, and the request for another one failed.
    #[error("token {namespace:?}/{service_account:?} expired and refresh failed: {error}")]
    Expired {
        /// Namespace of the service account.
        namespace: String,
        /// Name of the service account.
        service_account: String,
        /// Cause of the failed request.
        error: TokenError,
    },
}

/// Requests tokens from the API server.
#[async_trait]
pub trait TokenSource: Send + Sync {
    /// Sends a TokenRequest for the service account, bound to the pod.
    ///
    /// # Errors
    /// The request failed. The error does not contain the token.
    async fn request(&self, key: &TokenKey) -> Result<Token, TokenError>;
}

/// Cache of tokens (`pkg/kubelet/token: Manager`).
#[derive(Debug, Default)]
pub struct TokenCache {
    tokens: Mutex<HashMap<TokenKey, Arc<Token>>>,
}

impl TokenCache {
    /// Returns the cached token, or a new one after 80 % of its lifetime or a day
    /// (`pkg/kubelet/token: requiresRefresh`). `jitter` (0 to 10 s) spreads refreshes.
    ///
    /// # Errors
    /// The request failed, and there is no valid token.
    pub async fn get(
        &self,
        key: &TokenKey,
        source: Option<&dyn TokenSource>,
        now: Timestamp,
        jitter: Duration,
    ) -> Result<Arc<Token>, NoValidToken> {
        let cached = self.tokens.lock().get(key).cloned();
        if let Some(token) = cached.clone().filter(|t| !t.needs_refresh(now, jitter)) {
            return Ok(token);
        }
        let answer = match source {
            Some(source) => source.request(key).await,
            None => Err(TokenError::Standalone),
        };
        match (answer, cached) {
            (Ok(fresh), _) => {
                let fresh = Arc::new(fresh);
                self.tokens.lock().insert(key.clone(), fresh.clone());
                Ok(fresh)
            }
            (Err(error), None) => Err(NoValidToken::Fetch(error)),
            (Err(error), Some(old)) if now > old.expires => Err(NoValidToken::Expired {
                namespace: key.namespace.clone(),
                service_account: key.service_account.clone(),
                error,
            }),
            (Err(error), Some(old)) => {
                tracing::info!(
                    namespace = key.namespace,
                    service_account = key.service_account,
                    %error,
                    "token refresh failed, using the token that is still valid"
                );
                Ok(old)
            }
        }
    }

    /// Drops the tokens of a pod.
    pub fn remove_pod(&self, pod_uid: &str) {
        self.tokens.lock().retain(|key, _| key.pod_uid != pod_uid);
    }

    /// Drops expired tokens.
    pub fn remove_expired(&self, now: Timestamp) {
        self.tokens.lock().retain(|_, token| token.expires > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Fake {
        down: Mutex<bool>,
        requests: Mutex<u32>,
        clock: Mutex<Timestamp>,
        life: i64,
    }

    #[async_trait]
    impl TokenSource for Fake {
        async fn request(&self, _: &TokenKey) -> Result<Token, TokenError> {
            if *self.down.lock() {
                return Err(TokenError::Api("down".to_owned()));
            }
            *self.requests.lock() += 1;
            let token = format!("t{}", self.requests.lock());
            let expires = *self.clock.lock() + SignedDuration::from_secs(self.life);
            Ok(Token { token, expires, expiration_seconds: self.life })
        }
    }

    fn key() -> TokenKey {
        TokenKey {
            namespace: "default".into(),
            service_account: "sa".into(),
            audiences: vec![],
            expiration_seconds: 3600,
            pod_name: "web".into(),
            pod_uid: "u1".into(),
        }
    }

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_767_225_600 + seconds).unwrap()
    }

    #[tokio::test]
    async fn a_token_is_cached_for_four_fifths_of_its_lifetime_or_a_day() {
        for (life, last_kept, first_new) in [(3600, 2880, 2881), (7 * 86_400, 86_400, 86_401)] {
            let fake = Fake { life, clock: Mutex::new(at(0)), ..Fake::default() };
            let cache = TokenCache::default();
            for (second, want) in [(0, "t1"), (last_kept, "t1"), (first_new, "t2")] {
                *fake.clock.lock() = at(second);
                let got = cache.get(&key(), Some(&fake), at(second), Duration::ZERO).await.unwrap();
                assert_eq!(got.token, want, "{life} {second}");
            }
        }
        let fake = Fake { life: 3600, clock: Mutex::new(at(0)), ..Fake::default() };
        let cache = TokenCache::default();
        cache.get(&key(), Some(&fake), at(0), Duration::ZERO).await.unwrap();
        let got = cache.get(&key(), Some(&fake), at(2875), Duration::from_secs(10)).await.unwrap();
        assert_eq!(got.token, "t2", "jitter brings the refresh forward");
    }

    #[tokio::test]
    async fn a_failed_refresh_matters_only_once_the_token_has_expired() {
        let fake = Fake { life: 3600, clock: Mutex::new(at(0)), ..Fake::default() };
        let cache = TokenCache::default();
        *fake.down.lock() = true;
        let ask = |second: i64| cache.get(&KEY, Some(&fake), at(second), Duration::ZERO);
        static KEY: std::sync::LazyLock<TokenKey> = std::sync::LazyLock::new(key);
        assert_eq!(ask(0).await.unwrap_err().to_string(), "failed to fetch token: down");
        *fake.down.lock() = false;
        ask(0).await.unwrap();
        *fake.down.lock() = true;
        assert_eq!(ask(3000).await.unwrap().token, "t1");
        assert_eq!(
            ask(3601).await.unwrap_err().to_string(),
            "token \"default\"/\"sa\" expired and refresh failed: down"
        );
        let none = TokenCache::default();
        assert_eq!(
            none.get(&key(), None, at(0), Duration::ZERO).await.unwrap_err().to_string(),
            "failed to fetch token: cannot use TokenManager when kubelet is in standalone mode"
        );
    }

    #[tokio::test]
    async fn tokens_of_a_deleted_pod_and_expired_ones_are_dropped_and_none_is_printed() {
        let fake = Fake { life: 3600, clock: Mutex::new(at(0)), ..Fake::default() };
        let cache = TokenCache::default();
        let token = cache.get(&key(), Some(&fake), at(0), Duration::ZERO).await.unwrap();
        assert!(!format!("{token:?} {cache:?}").contains("t1"));
        cache.remove_expired(at(3599));
        assert_eq!(cache.tokens.lock().len(), 1);
        cache.remove_pod("u1");
        assert_eq!(cache.tokens.lock().len(), 0);
    }
}
