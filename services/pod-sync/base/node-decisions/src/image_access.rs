//! Decides whether a pod may use an image that is already present
//! (`pkg/kubelet/images/pullmanager: MustAttemptImagePull`).
//!
//! An image that was pulled with credentials may be used by a pod that presents credentials that pulled it
//! before. Any other pod has to pull it again.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::image_name;

/// Credentials beyond this many are not added to a record when they only match by content
/// (`pkg/kubelet/images/pullmanager`).
const MOST_LEARNT: usize = 100;

/// Selection of the images whose use is verified (`imagePullCredentialsVerificationPolicy`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum VerificationPolicy {
    /// No image is verified.
    NeverVerify,
    /// All images but those that were on the node before.
    #[default]
    NeverVerifyPreloadedImages,
    /// All images but those in the allowlist.
    NeverVerifyAllowlistedImages(Allowlist),
    /// All images.
    AlwaysVerify,
}

impl VerificationPolicy {
    /// Returns whether images of this repository are verified. `pulled_here`: there is a record of a pull.
    #[must_use]
    pub fn verifies(&self, repository: &str, pulled_here: bool) -> bool {
        match self {
            Self::NeverVerify => false,
            Self::NeverVerifyPreloadedImages => pulled_here,
            Self::NeverVerifyAllowlistedImages(list) => !list.has(repository),
            Self::AlwaysVerify => true,
        }
    }
}

/// Images that are never verified (`preloadedImagesVerificationAllowlist`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Allowlist {
    names: Vec<String>,
    // Prefixes including the trailing slash.
    prefixes: Vec<String>,
}

/// An entry of the allowlist is neither an image name nor `prefix/*`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{pattern:?} {problem}")]
pub struct InvalidPattern {
    pattern: String,
    problem: &'static str,
}

impl Allowlist {
    /// Parses patterns: image names with a registry and without tag and digest, or prefixes that end in `/*`.
    ///
    /// # Errors
    /// A pattern is neither.
    pub fn parse(patterns: &[String]) -> Result<Self, InvalidPattern> {
        let mut list = Self::default();
        for pattern in patterns {
            let bad = |problem| Err(InvalidPattern { pattern: pattern.clone(), problem });
            let prefix = pattern.strip_suffix('*').filter(|p| p.ends_with('/'));
            match (pattern.as_str(), prefix) {
                (p, _) if p.trim() != p => return bad("has spaces around it"),
                (_, Some("/")) => return bad("names no registry"),
                (_, Some(prefix)) if prefix.contains('*') => return bad("has a * before its end"),
                (_, Some(prefix)) => list.prefixes.push(prefix.to_owned()),
                ("", None) => return bad("is empty"),
                (p, None) if p.contains('*') => return bad("is a pattern that does not end in /*"),
                (p, None) if image_name::repository(p) != p => {
                    return bad("is not the whole name of an image: its registry, no tag, no digest");
                }
                (p, None) => list.names.push(p.to_owned()),
            }
        }
        Ok(list)
    }

    fn has(&self, repository: &str) -> bool {
        self.names.iter().any(|n| n == repository) || self.prefixes.iter().any(|p| repository.starts_with(p))
    }
}

/// A pull secret that pulled an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImagePullSecret {
    /// UID of the Secret.
    pub uid: String,
    /// Namespace of the Secret.
    pub namespace: String,
    /// Name of the Secret.
    pub name: String,
    /// Hex SHA-256 of the credentials.
    pub credential_hash: String,
}

impl ImagePullSecret {
    fn is_same_object(&self, other: &Self) -> bool {
        (&self.uid, &self.namespace, &self.name) == (&other.uid, &other.namespace, &other.name)
    }

    fn is_same_credential(&self, other: &Self) -> bool {
        !self.credential_hash.is_empty() && self.credential_hash == other.credential_hash
    }
}

/// A service account whose token pulled an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ImagePullServiceAccount {
    /// UID of the ServiceAccount.
    pub uid: String,
    /// Namespace of the ServiceAccount.
    pub namespace: String,
    /// Name of the ServiceAccount.
    pub name: String,
}

/// Credentials that pulled an image under one name (`pkg/kubelet/apis/config: ImagePullCredentials`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PullCredentials {
    /// Pull secrets, each of which may use the image.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_secrets: Vec<ImagePullSecret>,
    /// Service accounts, each of which may use the image.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kubernetes_service_accounts: Vec<ImagePullServiceAccount>,
    /// The image was pulled without credentials or with the node's, and every pod may use it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub node_pods_accessible: bool,
}

impl PullCredentials {
    /// Returns credentials that give access to every pod of the node.
    #[must_use]
    pub fn node_wide() -> Self {
        Self { node_pods_accessible: true, ..Self::default() }
    }

    /// Adds credentials. Returns whether anything changed.
    pub fn merge(&mut self, new: Self) -> bool {
        if self.node_pods_accessible {
            return false;
        }
        let before = self.clone();
        if new.node_pods_accessible {
            *self = Self::node_wide();
            return true;
        }
        for secret in new.kubernetes_secrets {
            // Only the newest credentials of a Secret are kept.
            self.kubernetes_secrets.retain(|s| !s.is_same_object(&secret));
            self.kubernetes_secrets.push(secret);
        }
        self.kubernetes_service_accounts.extend(new.kubernetes_service_accounts);
        self.kubernetes_secrets.sort();
        self.kubernetes_service_accounts.sort();
        self.kubernetes_service_accounts.dedup();
        *self != before
    }
}

/// Credentials that pulled an image, by repository.
pub type CredentialMapping = BTreeMap<String, PullCredentials>;

/// Origin of an image on the node, according to the pull records.
#[derive(Debug, Clone, Copy)]
pub enum ImageOrigin<'a> {
    /// The image was not pulled by this node agent.
    Preloaded,
    /// A pull began, and its result is not recorded.
    PullIntent,
    /// The image was pulled with these credentials.
    Pulled(&'a CredentialMapping),
}

/// Result of the check without the pod's credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PolicyCheck<'a> {
    /// The pod may use the image.
    Allowed,
    /// The image must be pulled again.
    MustPull,
    /// The pod may use it if it has one of these credentials.
    NeedsCredentials(&'a PullCredentials),
}

/// Checks whether any pod may use an image of `repository` that is already present.
#[must_use]
pub fn check_policy<'a>(
    policy: &VerificationPolicy,
    repository: &str,
    origin: ImageOrigin<'a>,
) -> PolicyCheck<'a> {
    let pulled_here = match origin {
        ImageOrigin::Preloaded => false,
        ImageOrigin::PullIntent | ImageOrigin::Pulled(_) => true,
    };
    if !policy.verifies(repository, pulled_here) {
        return PolicyCheck::Allowed;
    }
    let pull_credentials = match origin {
        ImageOrigin::Preloaded | ImageOrigin::PullIntent => return PolicyCheck::MustPull,
        ImageOrigin::Pulled(known) => known.get(repository),
    };
    match pull_credentials {
        Some(o) if o.node_pods_accessible => PolicyCheck::Allowed,
        Some(o) if !o.kubernetes_secrets.is_empty() || !o.kubernetes_service_accounts.is_empty() => {
            PolicyCheck::NeedsCredentials(o)
        }
        Some(_) | None => PolicyCheck::MustPull,
    }
}

/// Result of the check of a pod's credentials.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialCheck {
    /// The pod may use the image.
    Allowed,
    /// The pod may use the image, and this secret is added to the record.
    AllowedByMatch(ImagePullSecret),
    /// The image must be pulled again.
    MustPull,
}

/// Checks whether a pod with these credentials may use an image that `pull_credentials` pulled.
#[must_use]
pub fn check_credentials(
    pull_credentials: &PullCredentials,
    secrets: &[ImagePullSecret],
    accounts: &[ImagePullServiceAccount],
) -> CredentialCheck {
    let room = pull_credentials.kubernetes_secrets.len() < MOST_LEARNT;
    for secret in secrets {
        for known in &pull_credentials.kubernetes_secrets {
            match (known.is_same_credential(secret), known.is_same_object(secret)) {
                (true, true) => return CredentialCheck::Allowed,
                (true, false) | (false, true) if room => {
                    return CredentialCheck::AllowedByMatch(secret.clone());
                }
                // A Secret of the record has changed and the record is full, so the new content is not added.
                (true, false) => return CredentialCheck::Allowed,
                (false, true | false) => {}
            }
        }
    }
    if accounts.iter().any(|a| pull_credentials.kubernetes_service_accounts.contains(a)) {
        return CredentialCheck::Allowed;
    }
    CredentialCheck::MustPull
}

#[cfg(test)]
mod tests {
    use super::*;

    const APP: &str = "r.test/team/app";

    fn secret(name: &str, hash: &str) -> ImagePullSecret {
        let text = str::to_owned;
        ImagePullSecret {
            uid: format!("uid-{name}"),
            namespace: text("ns"),
            name: text(name),
            credential_hash: text(hash),
        }
    }

    fn account(name: &str) -> ImagePullServiceAccount {
        ImagePullServiceAccount {
            uid: format!("uid-{name}"),
            namespace: "ns".to_owned(),
            name: name.to_owned(),
        }
    }

    fn opened_by(secrets: &[ImagePullSecret], accounts: &[ImagePullServiceAccount]) -> PullCredentials {
        PullCredentials {
            kubernetes_secrets: secrets.to_vec(),
            kubernetes_service_accounts: accounts.to_vec(),
            node_pods_accessible: false,
        }
    }

    #[test]
    fn the_verification_policy_selects_the_verified_images() {
        let policies = [
            VerificationPolicy::NeverVerify,
            VerificationPolicy::NeverVerifyPreloadedImages,
            VerificationPolicy::NeverVerifyAllowlistedImages(
                Allowlist::parse(&["r.test/team/*".to_owned(), "docker.io/library/busybox".to_owned()])
                    .unwrap(),
            ),
            VerificationPolicy::AlwaysVerify,
        ];
        assert_eq!(VerificationPolicy::default(), policies[1]);
        let everybody: CredentialMapping = [(APP.to_owned(), PullCredentials::node_wide())].into();
        let nobody = CredentialMapping::new();
        let some = opened_by(&[secret("a", "h")], &[]);
        let somebody: CredentialMapping = [(APP.to_owned(), some.clone())].into();
        let (free, pull) = (PolicyCheck::Allowed, PolicyCheck::MustPull);
        let ask = PolicyCheck::NeedsCredentials(&some);
        for (what, repository, origin, want) in [
            ("preloaded", APP, ImageOrigin::Preloaded, [free, free, free, pull]),
            ("preloaded, not on the list", "r.test/app", ImageOrigin::Preloaded, [free, free, pull, pull]),
            (
                "preloaded, on the list",
                "docker.io/library/busybox",
                ImageOrigin::Preloaded,
                [free, free, free, pull],
            ),
            ("a longer name", "docker.io/library/busybox2", ImageOrigin::Preloaded, [free, free, pull, pull]),
            ("a pull was cut", "r.test/app", ImageOrigin::PullIntent, [free, pull, pull, pull]),
            ("pulled by all", APP, ImageOrigin::Pulled(&everybody), [free; 4]),
            (
                "pulled by all under another name",
                "r.test/app",
                ImageOrigin::Pulled(&everybody),
                [free, pull, pull, pull],
            ),
            (
                "pulled with unknown credentials",
                "r.test/app",
                ImageOrigin::Pulled(&nobody),
                [free, pull, pull, pull],
            ),
            ("pulled with a secret", APP, ImageOrigin::Pulled(&somebody), [free, ask, free, ask]),
        ] {
            for (policy, want) in policies.iter().zip(want) {
                assert_eq!(check_policy(policy, repository, origin), want, "{what}, {policy:?}");
            }
        }
    }

    #[test]
    fn a_pod_may_use_an_image_that_its_credentials_pulled() {
        let known = opened_by(&[secret("a", "h1"), secret("b", "h2"), secret("odd", "")], &[account("sa")]);
        let full: Vec<_> = (0..MOST_LEARNT).map(|i| secret(&format!("s{i}"), &format!("h{i}"))).collect();
        let full = opened_by(&full, &[]);
        let learn = |s: ImagePullSecret| CredentialCheck::AllowedByMatch(s);
        let impostor = ImagePullSecret { uid: "other".to_owned(), ..secret("a", "other") };
        let gone = ImagePullServiceAccount { uid: "other".to_owned(), ..account("sa") };
        for (what, pull_credentials, secrets, accounts, want) in [
            ("nothing", &known, vec![], vec![], CredentialCheck::MustPull),
            ("the same secret", &known, vec![secret("a", "h1")], vec![], CredentialCheck::Allowed),
            (
                "the second of two",
                &known,
                vec![secret("x", "hx"), secret("b", "h2")],
                vec![],
                CredentialCheck::Allowed,
            ),
            ("its copy elsewhere", &known, vec![secret("c", "h1")], vec![], learn(secret("c", "h1"))),
            (
                "the credentials were rotated",
                &known,
                vec![secret("a", "new")],
                vec![],
                learn(secret("a", "new")),
            ),
            ("recreated under its name", &known, vec![impostor], vec![], CredentialCheck::MustPull),
            ("another", &known, vec![secret("x", "hx")], vec![], CredentialCheck::MustPull),
            ("no hash is no match", &known, vec![secret("x", "")], vec![], CredentialCheck::MustPull),
            ("the account", &known, vec![], vec![account("sa")], CredentialCheck::Allowed),
            ("recreated account", &known, vec![], vec![gone], CredentialCheck::MustPull),
            ("a copy, no room", &full, vec![secret("c", "h1")], vec![], CredentialCheck::Allowed),
            ("rotated, no room", &full, vec![secret("s1", "new")], vec![], CredentialCheck::MustPull),
        ] {
            assert_eq!(check_credentials(pull_credentials, &secrets, &accounts), want, "{what}");
        }
    }

    #[test]
    fn credentials_are_recorded_once_and_node_wide_access_replaces_them() {
        let mut pull_credentials = PullCredentials::default();
        assert!(pull_credentials.merge(opened_by(&[secret("b", "h")], &[account("y")])));
        assert!(pull_credentials.merge(opened_by(&[secret("a", "h")], &[account("x")])));
        assert!(!pull_credentials.merge(opened_by(&[secret("b", "h")], &[account("y")])));
        assert!(pull_credentials.merge(opened_by(&[secret("b", "new")], &[])));
        let want = opened_by(&[secret("a", "h"), secret("b", "new")], &[account("x"), account("y")]);
        assert_eq!(pull_credentials, want);
        assert!(pull_credentials.merge(PullCredentials::node_wide()));
        assert_eq!(pull_credentials, PullCredentials::node_wide());
        assert!(!pull_credentials.merge(want));
        assert!(!pull_credentials.merge(PullCredentials::default()));
    }

    #[test]
    fn an_allowlist_has_whole_names_and_prefixes() {
        for (pattern, want) in [
            ("r.test/a", None),
            ("r.test:5000/a", None),
            ("r.test/*", None),
            ("r.test/a/b/*", None),
            ("", Some("\"\" is empty")),
            (" r.test/a", Some("\" r.test/a\" has spaces around it")),
            ("/*", Some("\"/*\" names no registry")),
            ("r.test/a*", Some("\"r.test/a*\" is a pattern that does not end in /*")),
            ("r.*/a/*", Some("\"r.*/a/*\" has a * before its end")),
            ("*", Some("\"*\" is a pattern that does not end in /*")),
            (
                "r.test/a:1",
                Some("\"r.test/a:1\" is not the whole name of an image: its registry, no tag, no digest"),
            ),
            (
                "busybox",
                Some("\"busybox\" is not the whole name of an image: its registry, no tag, no digest"),
            ),
        ] {
            let got = Allowlist::parse(&[pattern.to_owned()]).err().map(|e| e.to_string());
            assert_eq!(got.as_deref(), want, "{pattern}");
        }
    }
}
