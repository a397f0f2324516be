//! Flags of the offline cache.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::ArgAction;
use pod_sync_offline::{OfflineCache, OfflineSettings, SealingKey};
use quintlet_kit::args::paths::Paths;
use quintlet_kit::clock::Clock;

/// Directory below the root directory.
const DIR: &str = "quintlet-offline";
/// File below the state directory: the pods that were started from the cache since the boot.
const MARKS: &str = ".offline";
/// Directory of the credentials of a systemd unit.
const CREDENTIALS: &str = "CREDENTIALS_DIRECTORY";

/// Settings of the offline cache.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Starts while the API server is away")]
pub struct OfflineArgs {
    /// Keep admitted pods on the disk, with the ConfigMaps, Secrets and tokens that they need, and start them
    /// after a boot while the API server is away.
    #[arg(long = "offline-cache", action = ArgAction::Set, num_args = 0..=1, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub is_enabled: bool,
    /// Time without an answer of the API server after which it is away.
    #[arg(long = "offline-start-after", default_value = "20s", value_parser = humantime::parse_duration, value_name = "DURATION")]
    pub start_after: Duration,
    /// Key that encrypts the cache: the name of a systemd credential, or an absolute path; at least 32 random
    /// bytes. Not set: the cache is not encrypted.
    #[arg(long = "offline-credential", default_value = "", hide_default_value = true, value_name = "NAME")]
    pub credential: String,
}

impl OfflineArgs {
    /// Opens the cache; none if it is off, without an API server, and if its key or directory cannot be used.
    /// That is logged: pods start as without the cache.
    // Blocks: there is no pod before the start.
    pub(crate) fn open(
        &self,
        root_dir: &Path,
        paths: &Paths,
        node: &str,
        clock: &Clock,
    ) -> Option<OfflineCache> {
        if !self.is_enabled {
            return None;
        }
        let open = || {
            let credentials = std::env::var_os(CREDENTIALS).map(PathBuf::from);
            let settings = OfflineSettings {
                dir: root_dir.join(DIR),
                marks: paths.state_dir().join(MARKS),
                node: node.to_owned(),
                wait: self.start_after,
                key: self.key(credentials.as_deref())?,
                clock: clock.clone(),
            };
            OfflineCache::open(&settings).context("failed to open the directory of the cache")
        };
        match open() {
            Ok(cache) => Some(cache),
            Err(error) => {
                let error = quintlet_kit::error_chain(&*error);
                tracing::error!(
                    error,
                    "the offline cache is off: nothing is kept, and no pod starts from it"
                );
                None
            }
        }
    }

    // Without the key that is configured, nothing is written: Secrets would be on the disk in the clear.
    fn key(&self, credentials: Option<&Path>) -> anyhow::Result<Option<SealingKey>> {
        if self.credential.is_empty() {
            return Ok(None);
        }
        let name = Path::new(&self.credential);
        let path = if name.is_absolute() {
            name.to_owned()
        } else {
            let credentials = credentials.with_context(|| {
                format!("offlineCache.credential {}: the process has no {CREDENTIALS}", self.credential)
            })?;
            credentials.join(name)
        };
        let secret = std::fs::read(&path).with_context(|| format!("failed to read {}", path.display()))?;
        let key = SealingKey::of(&secret).with_context(|| format!("{}", path.display()))?;
        Ok(Some(key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(credential: &str) -> OfflineArgs {
        OfflineArgs {
            is_enabled: true,
            start_after: Duration::from_secs(20),
            credential: credential.to_owned(),
        }
    }

    #[test]
    fn a_key_is_a_credential_of_the_unit_or_a_file_and_a_missing_or_short_one_turns_the_cache_off() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("key"), [1; 32]).unwrap();
        std::fs::write(dir.path().join("short"), [1; 31]).unwrap();
        let key = |credential: &str, credentials: Option<&Path>| {
            args(credential)
                .key(credentials)
                .map(|key| key.is_some())
                .map_err(|e| quintlet_kit::error_chain(&*e))
        };
        let credentials = Some(dir.path());
        assert_eq!(key("", None), Ok(false));
        assert_eq!(key("key", credentials), Ok(true));
        assert_eq!(key(&dir.path().join("key").display().to_string(), None), Ok(true));
        let error = key("key", None).unwrap_err();
        assert_eq!(error, "offlineCache.credential key: the process has no CREDENTIALS_DIRECTORY");
        assert!(key("missing", credentials).unwrap_err().contains("/missing: "), "the path is named");
        let error = key("short", credentials).unwrap_err();
        assert!(error.ends_with("the key has 31 bytes, want 32 to 4096 random bytes"), "{error}");
    }
}
