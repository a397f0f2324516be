//! Finds the credentials for an image (`pkg/credentialprovider: DockerKeyring`). Does no I/O.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use pod_sync_node_decisions::image_name::{DEFAULT_DOMAIN, LEGACY_DEFAULT_DOMAIN, registry};
use serde::Deserialize;
use sha2::Digest as _;

use super::glob;

/// Credentials for a registry.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// User name; empty for a token alone.
    pub username: String,
    /// Password or token.
    pub password: String,
}

impl Credential {
    /// Returns the SHA-256 of the credentials in hex, as in the kubelet's pull records
    /// (`pkg/credentialprovider: hashAuthConfig`).
    #[must_use]
    pub fn hash(&self) -> String {
        let text = |t: &str| serde_json::Value::from(t).to_string();
        // Go omits empty fields.
        let fields = [("username", &self.username), ("password", &self.password)];
        let fields = fields.into_iter().filter(|(_, value)| !value.is_empty());
        let fields: Vec<_> = fields.map(|(name, value)| format!("{}:{}", text(name), text(value))).collect();
        let json = format!("{{{}}}", fields.join(","));
        hex::encode(sha2::Sha256::digest(quintlet_model::hash::escape_as_go(&json)))
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credential(***)")
    }
}

/// A Docker configuration is malformed. The message contains no part of the credentials.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidDockerConfig {
    /// The text is no JSON, or has other fields.
    #[error("docker config is malformed at line {line} column {column}")]
    Json {
        /// Line of the error, from 1.
        line: usize,
        /// Column of the error, from 1.
        column: usize,
    },
    /// `auth` of this registry is not `base64(username:password)`.
    #[error("unable to parse auth field of {0:?}, must be formatted as base64(username:password)")]
    Auth(String),
}

impl From<serde_json::Error> for InvalidDockerConfig {
    // The message of serde_json quotes its input, which may be a password.
    fn from(e: serde_json::Error) -> Self {
        Self::Json { line: e.line(), column: e.column() }
    }
}

/// Reads `null`, as Go does, as a field that is not set: tools write it for credentials in a helper.
#[derive(Default, Deserialize)]
struct WireEntry {
    username: Option<String>,
    password: Option<String>,
    auth: Option<String>,
}

type WireEntries = BTreeMap<String, Option<WireEntry>>;

#[derive(Default, Deserialize)]
struct WireFile {
    auths: Option<WireEntries>,
}

/// Credentials with the keys of their registries.
pub type Entries<T = Credential> = Vec<(String, T)>;

/// Parses `.dockerconfigjson` or `config.json`, with entries in `auths`.
///
/// # Errors
/// See [`InvalidDockerConfig`].
pub fn parse_config_json(bytes: &[u8]) -> Result<Entries, InvalidDockerConfig> {
    let file = serde_json::from_slice::<Option<WireFile>>(bytes)?.unwrap_or_default();
    entries(file.auths)
}

/// Parses `.dockercfg`, with entries at the top level.
///
/// # Errors
/// See [`InvalidDockerConfig`].
pub fn parse_dockercfg(bytes: &[u8]) -> Result<Entries, InvalidDockerConfig> {
    entries(serde_json::from_slice(bytes)?)
}

fn entries(wire: Option<WireEntries>) -> Result<Entries, InvalidDockerConfig> {
    wire.unwrap_or_default()
        .into_iter()
        .map(|(key, entry)| {
            let entry = entry.unwrap_or_default();
            let credential = match entry.auth.as_deref().map(str::trim).filter(|a| !a.is_empty()) {
                Some(auth) => decode(auth).ok_or_else(|| InvalidDockerConfig::Auth(key.clone()))?,
                None => Credential {
                    username: entry.username.unwrap_or_default(),
                    password: entry.password.unwrap_or_default(),
                },
            };
            Ok((key, credential))
        })
        .collect()
}

fn decode(auth: &str) -> Option<Credential> {
    let bytes = if auth.ends_with('=') { STANDARD.decode(auth) } else { STANDARD_NO_PAD.decode(auth) };
    let text = String::from_utf8(bytes.ok()?).ok()?;
    let (username, password) = text.split_once(':')?;
    Some(Credential { username: username.to_owned(), password: password.to_owned() })
}

/// Credentials, or other values with such keys, looked up by image
/// (`pkg/credentialprovider: BasicDockerKeyring`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keyring<T = Credential> {
    // More specific keys first.
    by_key: Vec<(String, Vec<T>)>,
}

impl<T: Clone> Keyring<T> {
    /// Builds a keyring from registries with their credentials.
    #[must_use]
    pub fn new(entries: Entries<T>) -> Self {
        let mut by_key: BTreeMap<String, Vec<T>> = BTreeMap::new();
        for (key, credential) in entries {
            by_key.entry(normal_key(&key)).or_default().push(credential);
        }
        Self { by_key: by_key.into_iter().rev().collect() }
    }

    /// Returns the credentials for `repository` (see
    /// [`image_name::repository`](pod_sync_node_decisions::image_name::repository)), best match first.
    #[must_use]
    pub fn lookup(&self, repository: &str) -> Vec<T> {
        let matching: Vec<T> = self
            .by_key
            .iter()
            .filter(|(key, _)| matches(key, repository))
            .flat_map(|(_, credentials)| credentials.iter().cloned())
            .collect();
        if !matching.is_empty() || registry(repository) != DEFAULT_DOMAIN {
            return matching;
        }
        let default = self.by_key.iter().find(|(key, _)| key == LEGACY_DEFAULT_DOMAIN);
        default.map(|(_, credentials)| credentials.clone()).unwrap_or_default()
    }
}

/// Strips the scheme and API version that old versions of docker wrote.
fn normal_key(key: &str) -> String {
    let rest = key.strip_prefix("https://").or_else(|| key.strip_prefix("http://")).unwrap_or(key);
    let (host, path) = rest.split_at(rest.find('/').unwrap_or(rest.len()));
    let path = if path.starts_with("/v1/") || path.starts_with("/v2/") { &path[3..] } else { path };
    if path == "/" { host.to_owned() } else { format!("{host}{path}") }
}

/// Returns whether credentials with a key or pattern (`*.example.com:5000/team`) apply to a repository: the
/// ports are equal, the hosts have the same number of labels, each label matches its pattern, and the
/// repository's path begins with the key's (`pkg/credentialprovider: URLsMatch`).
#[must_use]
pub fn matches(key: &str, repository: &str) -> bool {
    let split = |text: &str| -> (Vec<String>, String, String) {
        let (host, path) = text.split_at(text.find('/').unwrap_or(text.len()));
        let (host, port) = host.rsplit_once(':').unwrap_or((host, ""));
        (host.split('.').map(str::to_owned).collect(), port.to_owned(), path.to_owned())
    };
    let (key_parts, key_port, key_path) = split(key);
    let (parts, port, path) = split(repository);
    key_port == port
        && key_parts.len() == parts.len()
        && path.starts_with(&key_path)
        && key_parts.iter().zip(&parts).all(|(pattern, part)| glob::matches(pattern, part))
}

#[cfg(test)]
mod tests {
    use super::*;
    use pod_sync_node_decisions::image_name::repository;

    fn user(name: &str) -> Credential {
        Credential { username: name.to_owned(), password: format!("{name}-pass") }
    }

    fn names(keyring: &Keyring, image: &str) -> Vec<String> {
        keyring.lookup(&repository(image)).into_iter().map(|c| c.username).collect()
    }

    #[test]
    fn a_credential_has_the_hash_of_the_kubelets_json() {
        // printf '{"username":"u\\u0026","password":"p"}' | sha256sum
        let hash = |username: &str, password: &str| {
            Credential { username: username.to_owned(), password: password.to_owned() }.hash()
        };
        assert_eq!(hash("u&", "p"), "c0e27c8a013d89c8959efe636a9f867b000615e1a76f39b4bc83f3d7b9b30f2e");
        assert_eq!(hash("u", ""), "a67095390396c5936dbf649847f03cd8fe40afea9cb9488eaff8699dc6b53dcb");
    }

    #[test]
    fn a_key_matches_by_host_port_and_path() {
        for (key, image, want) in [
            ("r.example", "r.example/a", true),
            ("r.example", "r.example:5000/a", false),
            ("r.example:5000", "r.example:5000/a", true),
            ("r.example:5000", "r.example/a", false),
            ("*.example", "r.example/a", true),
            ("*.example", "a.r.example/a", false),
            ("*.*.example", "a.r.example/a", true),
            ("r*.example", "reg.example/a", true),
            ("r?.example", "r1.example/a", true),
            ("r[0-9].example", "r1.example/a", true),
            ("r[^0-9].example", "r1.example/a", false),
            ("r[0-9.example", "r1.example/a", false),
            ("r\\1.example", "r1.example/a", true),
            ("r.example/team", "r.example/team/app", true),
            ("r.example/team", "r.example/teamwork/app", true),
            ("r.example/team/", "r.example/teamwork/app", false),
            ("r.example/other", "r.example/team/app", false),
            ("*", "localhost/app", true),
        ] {
            let got = matches(&normal_key(key), &repository(image));
            assert_eq!(got, want, "{key} for {image}");
        }
    }

    #[test]
    fn the_more_specific_key_comes_first_and_all_that_match_are_used() {
        let keyring = Keyring::new(vec![
            ("*.example".into(), user("glob")),
            ("r.example".into(), user("host")),
            ("https://r.example/v2/team".into(), user("team")),
            ("http://r.example/v1/".into(), user("old")),
            ("elsewhere.example".into(), user("no")),
        ]);
        assert_eq!(names(&keyring, "r.example/team/app:1"), ["team", "host", "old", "glob"]);
        assert_eq!(names(&keyring, "r.example/app"), ["host", "old", "glob"]);
        assert!(names(&keyring, "other.test/app").is_empty());
    }

    #[test]
    fn the_default_registry_has_a_second_key() {
        let hub = Keyring::new(vec![("https://index.docker.io/v1/".into(), user("hub"))]);
        assert_eq!(names(&hub, "busybox"), ["hub"]);
        assert!(names(&hub, "r.example/busybox").is_empty());
        let both = Keyring::new(vec![
            ("index.docker.io".into(), user("fallback")),
            ("docker.io/library".into(), user("direct")),
        ]);
        assert_eq!(names(&both, "busybox"), ["direct"], "the second key is for when nothing else matches");
    }

    #[test]
    fn null_is_a_field_that_is_not_set() {
        let empty = Credential { username: String::new(), password: String::new() };
        let user = Credential { username: "u".into(), ..empty.clone() };
        for (text, want) in [
            ("null", vec![]),
            (r#"{"auths": null}"#, vec![]),
            (r#"{"auths": {"r": null}}"#, vec![("r".to_owned(), empty.clone())]),
            (
                r#"{"auths": {"r": {"auth": null, "username": null, "password": null}}}"#,
                vec![("r".to_owned(), empty)],
            ),
            (
                r#"{"auths": {"r": {"auth": null, "username": "u", "email": null}}, "credHelpers": null}"#,
                vec![("r".to_owned(), user.clone())],
            ),
        ] {
            assert_eq!(parse_config_json(text.as_bytes()), Ok(want), "{text}");
        }
        assert_eq!(parse_dockercfg(b"null"), Ok(vec![]));
        let cfg = br#"{"r": {"auth": null, "username": "u", "password": null}}"#;
        assert_eq!(parse_dockercfg(cfg), Ok(vec![("r".to_owned(), user)]));
    }

    #[test]
    fn entries_are_read_from_both_forms_and_auth_wins() {
        let padded = STANDARD.encode("a:b:c");
        let bare = STANDARD_NO_PAD.encode("x:y");
        let json = format!(
            r#"{{"r1": {{"username": "u", "password": "p", "email": "e"}},
                "r2": {{"username": "ignored", "auth": "{padded}"}}, "r3": {{"auth": "{bare}"}}}}"#
        );
        let want = vec![
            ("r1".to_owned(), Credential { username: "u".into(), password: "p".into() }),
            ("r2".to_owned(), Credential { username: "a".into(), password: "b:c".into() }),
            ("r3".to_owned(), Credential { username: "x".into(), password: "y".into() }),
        ];
        assert_eq!(parse_dockercfg(json.as_bytes()).unwrap(), want);
        assert_eq!(parse_config_json(format!(r#"{{"auths": {json}}}"#).as_bytes()).unwrap(), want);
        assert_eq!(parse_config_json(b"{}").unwrap(), []);
    }

    #[test]
    fn an_error_contains_no_part_of_the_credentials() {
        for bad in [
            r#"{"auths": {"r": {"password": ["hunter2"]}}}"#,
            r#"{"auths": {"r": {"auth": "aHVudGVyMg=="}}}"#,
            r#"{"auths": {"r": {"auth": "hunter2!"}}}"#,
            r#"hunter2"#,
        ] {
            let error = parse_config_json(bad.as_bytes()).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(!text.contains("hunter2") && !text.contains("aHVu"), "{text}");
        }
        assert_eq!(format!("{:?}", user("x")), "Credential(***)");
    }
}
