//! Credentials for image pulls: the pod's secrets, files of the node, and credential provider plugins, in
//! this order (`pkg/credentialprovider: DockerKeyring`).

mod glob;
pub mod keyring;
pub mod node_files;
pub mod plugins;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use k8s_openapi::api::core::v1::{Pod, Secret};
use pod_sync_layout::{ObjectSource, TokenCache, TokenKey, TokenSource};
use pod_sync_node_decisions::image_access::{ImagePullSecret, ImagePullServiceAccount, PullCredentials};
use pod_sync_node_decisions::image_name;
use quintlet_model::pod as pods;

use self::keyring::{Credential, InvalidDockerConfig, Keyring, parse_config_json, parse_dockercfg};
use self::node_files::NodeFiles;
use self::plugins::{PluginAccount, PluginAccounts, Plugins, TokenAttributes};

/// Requested lifetime of a token for a plugin, in seconds: the default of the API server.
const TOKEN_SECONDS: i64 = 3600;

/// Sources of credentials.
#[derive(Debug)]
pub struct Credentials {
    files: Arc<NodeFiles>,
    plugins: Option<Plugins>,
    tokens: TokenCache,
}

/// The content of an image pull secret cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("image pull secret {name:?}: {problem}")]
pub struct InvalidPullSecret {
    name: String,
    problem: InvalidDockerConfig,
}

impl Credentials {
    /// Builds the sources from the node's files and its plugins.
    #[must_use]
    pub fn new(files: NodeFiles, plugins: Option<Plugins>) -> Self {
        Self { files: Arc::new(files), plugins, tokens: TokenCache::default() }
    }

    /// Fetches the pod's service account for each plugin that applies to the image.
    pub async fn accounts(
        &self,
        image: &str,
        pod: &Pod,
        source: Option<&dyn TokenSource>,
        objects: &dyn ObjectSource,
        now: jiff::Timestamp,
    ) -> PluginAccounts {
        let mut all = PluginAccounts::new();
        let Some(plugins) = &self.plugins else { return all };
        let Some(name) = pods::spec(pod).service_account_name.clone().filter(|n| !n.is_empty()) else {
            return all;
        };
        self.tokens.remove_expired(now);
        for (place, attributes) in plugins.token_attributes(&image_name::repository(image)) {
            let account = match self.account(attributes, &name, pod, source, objects, now).await {
                Ok(account) => account,
                Err(why) => {
                    let meta = &pod.metadata;
                    tracing::info!(
                        pod.name = format!(
                            "{}/{}",
                            meta.namespace.as_deref().unwrap_or_default(),
                            meta.name.as_deref().unwrap_or_default()
                        ),
                        pod.uid = meta.uid.as_deref().unwrap_or_default(),
                        why,
                        "service account read failed, asking the credential provider without it"
                    );
                    None
                }
            };
            all.insert(place, account);
        }
        all
    }

    /// Returns `None` if the account lacks what the plugin requires.
    async fn account(
        &self,
        attributes: &TokenAttributes,
        name: &str,
        pod: &Pod,
        source: Option<&dyn TokenSource>,
        objects: &dyn ObjectSource,
        now: jiff::Timestamp,
    ) -> Result<Option<PluginAccount>, String> {
        let meta = &pod.metadata;
        let namespace = meta.namespace.clone().unwrap_or_default();
        let mut annotations = BTreeMap::new();
        if attributes.needs_annotations() {
            let all = objects.service_account_annotations(&namespace, name).await;
            let Some(selected) = attributes.select(&all.map_err(|e| e.to_string())?) else { return Ok(None) };
            annotations = selected;
        }
        let key = TokenKey {
            namespace,
            service_account: name.to_owned(),
            audiences: vec![attributes.service_account_token_audience.clone()],
            expiration_seconds: TOKEN_SECONDS,
            pod_name: meta.name.clone().unwrap_or_default(),
            pod_uid: meta.uid.clone().unwrap_or_default(),
        };
        let token = self.tokens.get(&key, source, now, Duration::ZERO).await.map_err(|e| e.to_string())?;
        Ok(Some(PluginAccount {
            token: token.token.clone(),
            account: ImagePullServiceAccount {
                uid: account_uid(&token.token).unwrap_or_default(),
                namespace: key.namespace,
                name: key.service_account,
            },
            annotations,
        }))
    }

    /// Returns the credentials for an image, best first. `now` is CLOCK_BOOTTIME.
    ///
    /// # Errors
    /// A pull secret of the pod is malformed.
    pub async fn of(
        &self,
        image: &str,
        secrets: &[Arc<Secret>],
        accounts: &PluginAccounts,
        now: Duration,
    ) -> Result<Vec<PresentedCredential>, InvalidPullSecret> {
        let repository = image_name::repository(image);
        let mut all = of_secrets(secrets)?.lookup(&repository);
        let files = Arc::clone(&self.files);
        let node = quintlet_kit::task::blocking(move || files.keyring(now)).await;
        let of_node = |credential| PresentedCredential { credential, owner: CredentialSource::Node };
        all.extend(node.lookup(&repository).into_iter().map(of_node));
        if let Some(plugins) = &self.plugins {
            for (credential, account) in plugins.lookup(image, &repository, accounts).await {
                let owner = account.map_or(CredentialSource::Node, CredentialSource::ServiceAccount);
                all.push(PresentedCredential { credential, owner });
            }
        }
        Ok(all)
    }
}

/// A credential and its source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PresentedCredential {
    /// User name and password for the registry.
    pub credential: Credential,
    /// Source of the credential, whose owner may use an image that was pulled with it.
    pub owner: CredentialSource,
}

/// Source of a credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CredentialSource {
    /// The node: its files, or a plugin that uses no service account.
    Node,
    /// A pull secret of the pod.
    Secret(ImagePullSecret),
    /// The pod's service account.
    ServiceAccount(ImagePullServiceAccount),
}

impl CredentialSource {
    /// Returns the record of credentials for an image that this credential pulled.
    #[must_use]
    pub fn pull_credentials(self) -> PullCredentials {
        match self {
            Self::Secret(secret) => {
                PullCredentials { kubernetes_secrets: vec![secret], ..PullCredentials::default() }
            }
            // An account without a UID cannot be distinguished from a recreated one, so it is valid only for
            // this pull.
            Self::ServiceAccount(account) if account.uid.is_empty() => PullCredentials::default(),
            Self::ServiceAccount(account) => {
                PullCredentials { kubernetes_service_accounts: vec![account], ..PullCredentials::default() }
            }
            Self::Node => PullCredentials::node_wide(),
        }
    }
}

/// Returns the UID in the token. The signature is not checked, since the API server itself sent the token.
fn account_uid(token: &str) -> Option<String> {
    let claims = token.split('.').nth(1)?;
    let bytes = base64::engine::general_purpose::URL_SAFE_NO_PAD.decode(claims).ok()?;
    let claims: serde_json::Value = serde_json::from_slice(&bytes).ok()?;
    Some(claims["kubernetes.io"]["serviceaccount"]["uid"].as_str()?.to_owned())
}

/// Returns the credentials in the pod's pull secrets. Secrets of other types have none.
fn of_secrets(secrets: &[Arc<Secret>]) -> Result<Keyring<PresentedCredential>, InvalidPullSecret> {
    let mut entries = Vec::new();
    for secret in secrets {
        let data = |key: &str| secret.data.as_ref().and_then(|d| d.get(key)).map(|b| b.0.as_slice());
        let parsed = match secret.type_.as_deref() {
            Some("kubernetes.io/dockerconfigjson") => data(".dockerconfigjson").map(parse_config_json),
            Some("kubernetes.io/dockercfg") => data(".dockercfg").map(parse_dockercfg),
            Some(_) | None => None,
        };
        match parsed {
            Some(Ok(found)) => entries.extend(found.into_iter().map(|(key, credential)| {
                let used = ImagePullSecret {
                    uid: secret.metadata.uid.clone().unwrap_or_default(),
                    namespace: secret.metadata.namespace.clone().unwrap_or_default(),
                    name: secret.metadata.name.clone().unwrap_or_default(),
                    credential_hash: credential.hash(),
                };
                (key, PresentedCredential { credential, owner: CredentialSource::Secret(used) })
            })),
            Some(Err(problem)) => {
                return Err(InvalidPullSecret {
                    name: secret.metadata.name.clone().unwrap_or_default(),
                    problem,
                });
            }
            None => {}
        }
    }
    Ok(Keyring::new(entries))
}

#[cfg(test)]
mod tests {
    use super::node_files::ConfigDirs;
    use super::*;
    use k8s_openapi::ByteString;

    fn secret(kind: &str, key: &str, value: &str) -> Arc<Secret> {
        let mut secret = Secret { type_: Some(kind.to_owned()), ..Secret::default() };
        secret.metadata.name = Some("s".to_owned());
        secret.data = Some([(key.to_owned(), ByteString(value.as_bytes().to_vec()))].into());
        Arc::new(secret)
    }

    #[test]
    fn an_account_is_identified_by_the_uid_in_its_token() {
        let encode = |t: &str| base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(t);
        let claims = encode(r#"{"kubernetes.io": {"serviceaccount": {"name": "sa", "uid": "u-1"}}}"#);
        assert_eq!(account_uid(&format!("{}.{claims}.sig", encode("{}"))).as_deref(), Some("u-1"));
        for other in ["opaque", "a.b.c", &format!("x.{}.y", encode("{}"))] {
            assert_eq!(account_uid(other), None, "{other}");
        }
        let unknown = ImagePullServiceAccount { name: "sa".to_owned(), ..ImagePullServiceAccount::default() };
        assert_eq!(CredentialSource::ServiceAccount(unknown).pull_credentials(), PullCredentials::default());
    }

    #[tokio::test]
    async fn the_pods_secrets_come_before_the_nodes_files() {
        let dir = tempfile::tempdir().unwrap();
        let entry = |user: &str| format!(r#"{{"r.test": {{"username": "{user}", "password": "p"}}}}"#);
        std::fs::write(dir.path().join(".dockercfg"), entry("node")).unwrap();
        let dirs = ConfigDirs { root: dir.path().to_owned(), ..ConfigDirs::default() };
        let credentials = Credentials::new(NodeFiles::new(&dirs), None);
        let auths = |user: &str| format!(r#"{{"auths": {}}}"#, entry(user));
        let json = "kubernetes.io/dockerconfigjson";
        for (secrets, want) in [
            (vec![], vec!["node"]),
            (vec![secret(json, ".dockerconfigjson", &auths("a"))], vec!["a", "node"]),
            (vec![secret("kubernetes.io/dockercfg", ".dockercfg", &entry("b"))], vec!["b", "node"]),
            (
                vec![
                    secret(json, ".dockerconfigjson", &auths("a")),
                    secret("kubernetes.io/dockercfg", ".dockercfg", &entry("b")),
                ],
                vec!["a", "b", "node"],
            ),
            (vec![secret(json, ".dockerconfigjson", &auths("node"))], vec!["node", "node"]),
            (vec![secret("Opaque", ".dockerconfigjson", &auths("a"))], vec!["node"]),
            (vec![secret(json, "other", &auths("a"))], vec!["node"]),
        ] {
            let got = credentials
                .of("r.test/app:1", &secrets, &PluginAccounts::new(), Duration::ZERO)
                .await
                .unwrap();
            assert_eq!(got.into_iter().map(|p| p.credential.username).collect::<Vec<_>>(), want);
        }
        assert!(
            credentials
                .of("other.test/app", &[], &PluginAccounts::new(), Duration::ZERO)
                .await
                .unwrap()
                .is_empty()
        );
        let bad = [secret(json, ".dockerconfigjson", "{")];
        let error =
            credentials.of("r.test/app", &bad, &PluginAccounts::new(), Duration::ZERO).await.unwrap_err();
        assert_eq!(
            error.to_string(),
            "image pull secret \"s\": docker config is malformed at line 1 column 1"
        );
    }
}
