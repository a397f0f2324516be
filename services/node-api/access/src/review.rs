//! TokenReviews and SubjectAccessReviews.
//!
//! The client is recreated when the kubeconfig or a file that it names changes. Concurrent reviews are
//! bounded per kind: a flood of tokens neither reaches the API server nor delays access reviews of
//! authenticated users.

use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::{Api, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use parking_lot::{Mutex, RwLock};
use quintlet_kit::backoff::Backoff;
use quintlet_kit::task;
use tokio::sync::Semaphore;

use crate::digest::{self, Digest};
use crate::user::User;

/// Maximum number of concurrent reviews of one kind.
const IN_FLIGHT: usize = 32;
/// Time limit of a review, including the wait for its turn.
const LIMIT: Duration = Duration::from_secs(10);
/// Attempts of one review, as in webhooks of the kubelet: the delay starts at 500 ms and grows by half.
const STEPS: u32 = 5;
const FIRST_WAIT: Duration = Duration::from_millis(500);

/// The reason why a review has no result.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReviewError {
    /// The kubeconfig cannot be read, or is not valid.
    #[error("failed to use kubeconfig {}", path.display())]
    Kubeconfig {
        /// Path of the kubeconfig.
        path: PathBuf,
        /// The error of its reader.
        source: kube::config::KubeconfigError,
    },
    /// The kubeconfig is valid, and its TLS settings are not.
    #[error("failed to create the API client")]
    Client(#[source] kube::Error),
    /// The API server refused the review, or the connection failed.
    #[error("review by the API server failed")]
    Api(#[source] kube::Error),
    /// The API server did not answer within the limit.
    #[error("review took longer than {}s", LIMIT.as_secs())]
    Slow,
    /// The node has no credential for the API server yet.
    #[error("kubeconfig {} does not exist yet", .0.display())]
    NoKubeconfig(PathBuf),
}

impl ReviewError {
    fn is_retryable(&self) -> bool {
        match self {
            Self::Api(kube::Error::Api(status)) => status.code == 429 || status.code >= 500,
            Self::Api(_) => true,
            Self::Kubeconfig { .. } | Self::Client(_) | Self::Slow | Self::NoKubeconfig(_) => false,
        }
    }
}

/// The question of a SubjectAccessReview.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Question<'a> {
    /// The user of the request.
    pub user: &'a User,
    /// The verb in the terms of the API: `get`, `create`, `proxy`, …
    pub verb: &'a str,
    /// Name of the node.
    pub node: &'a str,
    /// Subresource of the node.
    pub subresource: &'a str,
}

/// Sends reviews to the API server.
pub struct Reviewer {
    path: PathBuf,
    /// Is empty until the kubeconfig exists, which pod-sync writes after a bootstrap.
    client: RwLock<Option<kube::Client>>,
    /// Digest of the files that were read last, whether valid or not.
    seen: Mutex<Digest>,
    tokens: Semaphore,
    accesses: Semaphore,
}

impl std::fmt::Debug for Reviewer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reviewer").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Reviewer {
    /// Creates a reviewer with the identity of a kubeconfig. Reviews fail until the file exists.
    ///
    /// # Errors
    /// Fails if the kubeconfig is invalid. A missing file and an unreachable API server are not errors.
    pub async fn load(path: &Path) -> Result<Self, ReviewError> {
        // Computed before the files are read, so that a change in between is noticed later.
        let file = path.to_owned();
        let (seen, exists) = task::blocking(move || {
            let seen = digest::of_files(&files(&file));
            (Mutex::new(seen), file.try_exists().unwrap_or(true))
        })
        .await;
        let client = RwLock::new(if exists { Some(client(path).await?) } else { None });
        let [tokens, accesses] = [IN_FLIGHT; 2].map(Semaphore::new);
        Ok(Self { path: path.to_owned(), client, seen, tokens, accesses })
    }

    /// Recreates the client if the kubeconfig or a file that it names has changed. Returns whether it has. An
    /// invalid kubeconfig leaves the previous client in use.
    ///
    /// # Errors
    /// Fails as [`Reviewer::load`], once per change.
    pub async fn refresh(&self) -> Result<bool, ReviewError> {
        let path = self.path.clone();
        let found = task::blocking(move || digest::of_files(&files(&path))).await;
        if std::mem::replace(&mut *self.seen.lock(), found) == found {
            return Ok(false);
        }
        let new = client(&self.path).await?;
        *self.client.write() = Some(new);
        Ok(true)
    }

    /// Returns the user of a token, or none if the token is invalid.
    ///
    /// # Errors
    /// Fails if the API server does not answer.
    pub async fn token(&self, token: &str) -> Result<Option<User>, ReviewError> {
        let review = TokenReview {
            spec: TokenReviewSpec { token: token.to_owned(), audiences: None },
            ..TokenReview::default()
        };
        let status = self.ask(&self.tokens, &review).await?.status.unwrap_or_default();
        if status.authenticated != Some(true) {
            return Ok(None);
        }
        let user = status.user.unwrap_or_default();
        Ok(Some(
            User {
                name: user.username.unwrap_or_default(),
                uid: user.uid.unwrap_or_default(),
                groups: user.groups.unwrap_or_default(),
                extra: user.extra.unwrap_or_default(),
            }
            .authenticated(),
        ))
    }

    /// Returns whether access is allowed.
    ///
    /// # Errors
    /// Fails if the API server does not answer.
    pub async fn access(&self, question: &Question<'_>) -> Result<bool, ReviewError> {
        let Question { user, verb, node, subresource } = *question;
        let review = SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(user.name.clone()),
                uid: Some(user.uid.clone()).filter(|u| !u.is_empty()),
                groups: Some(user.groups.clone()),
                extra: Some(user.extra.clone()).filter(|e| !e.is_empty()),
                resource_attributes: Some(ResourceAttributes {
                    verb: Some(verb.to_owned()),
                    group: Some(String::new()),
                    version: Some("v1".to_owned()),
                    resource: Some("nodes".to_owned()),
                    subresource: Some(subresource.to_owned()),
                    name: Some(node.to_owned()),
                    ..ResourceAttributes::default()
                }),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        Ok(self
            .ask(&self.accesses, &review)
            .await?
            .status
            .is_some_and(|s| s.allowed && s.denied != Some(true)))
    }

    async fn ask<K>(&self, permits: &Semaphore, review: &K) -> Result<K, ReviewError>
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::Serialize
            + serde::de::DeserializeOwned,
    {
        let all = async {
            // The semaphore is never closed.
            let _permit = permits.acquire().await;
            let mut backoff = Backoff::new(FIRST_WAIT, 1.5, LIMIT);
            let mut step = 1_u32;
            loop {
                let client = self.client.read().clone();
                let client = client.ok_or_else(|| ReviewError::NoKubeconfig(self.path.clone()))?;
                let api: Api<K> = Api::all(client);
                match api.create(&PostParams::default(), review).await.map_err(ReviewError::Api) {
                    Err(error) if error.is_retryable() && step < STEPS => {
                        tokio::time::sleep(backoff.next_wait()).await;
                        step = step.saturating_add(1);
                    }
                    answer => return answer,
                }
            }
        };
        tokio::time::timeout(LIMIT, all).await.unwrap_or(Err(ReviewError::Slow))
    }
}

/// Returns the kubeconfig and the files that it names.
fn files(path: &Path) -> Vec<PathBuf> {
    let read = Kubeconfig::read_from(path).unwrap_or_default();
    let users = read.auth_infos.into_iter().filter_map(|u| u.auth_info);
    let named = users.flat_map(|u| [u.client_certificate, u.client_key, u.token_file]).flatten();
    let cas = read.clusters.into_iter().filter_map(|c| c.cluster?.certificate_authority);
    named.chain(cas).map(PathBuf::from).chain([path.to_owned()]).collect()
}

async fn client(path: &Path) -> Result<kube::Client, ReviewError> {
    let unusable = |source| ReviewError::Kubeconfig { path: path.to_owned(), source };
    let file = path.to_owned();
    let read = task::blocking(move || Kubeconfig::read_from(file)).await.map_err(unusable)?;
    let mut config =
        kube::Config::from_custom_kubeconfig(read, &KubeConfigOptions::default()).await.map_err(unusable)?;
    config.connect_timeout = Some(Duration::from_secs(5));
    config.read_timeout = Some(LIMIT);
    kube::Client::try_from(config).map_err(ReviewError::Client)
}
