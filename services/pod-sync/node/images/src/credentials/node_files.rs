//! Credentials of the node, from Docker configuration files
//! (`pkg/credentialprovider: ReadDockerConfigJSONFile`).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::keyring::{Entries, InvalidDockerConfig, Keyring, parse_config_json, parse_dockercfg};

/// Lifetime of the cached files (`pkg/credentialprovider: defaultDockerConfigProvider`).
const CACHED: Duration = Duration::from_secs(5 * 60);
/// Size limit of a file, in bytes.
const LARGEST: u64 = 1 << 20;

type Parse = fn(&[u8]) -> Result<Entries, InvalidDockerConfig>;

/// The files that may hold credentials. The first one that exists is used.
#[derive(Debug)]
pub struct NodeFiles {
    candidates: Vec<(PathBuf, Parse)>,
    // Keyring and the CLOCK_BOOTTIME at which it was read.
    cached: Mutex<Option<(Arc<Keyring>, Duration)>>,
}

/// Directories that may have Docker configuration files.
#[derive(Debug, Clone, Default)]
pub struct ConfigDirs {
    /// The kubelet's root directory.
    pub root: PathBuf,
    /// The working directory.
    pub cwd: Option<PathBuf>,
    /// `$HOME`.
    pub home: Option<PathBuf>,
    /// `$DOCKER_CONFIG`: a directory with precedence over all others.
    pub docker_config: Option<PathBuf>,
}

impl ConfigDirs {
    /// Returns the directories of this process.
    #[must_use]
    pub fn of_this_process(root: &Path) -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        Self {
            root: root.to_owned(),
            cwd: std::env::current_dir().ok(),
            home: variable("HOME"),
            docker_config: variable("DOCKER_CONFIG"),
        }
    }
}

impl NodeFiles {
    /// Uses these directories, and `/`.
    #[must_use]
    pub fn new(dirs: &ConfigDirs) -> Self {
        let ConfigDirs { root, cwd, home, docker_config } = dirs;
        let slash = PathBuf::from("/");
        let dirs = docker_config
            .iter()
            .cloned()
            .chain([root.clone()])
            .chain(cwd.clone())
            .chain(home.as_ref().map(|h| h.join(".docker")))
            .chain([slash.join(".docker")]);
        let old = [root.clone()].into_iter().chain(cwd.clone()).chain(home.clone()).chain([slash]);
        let json = dirs.map(|d| (d.join("config.json"), parse_config_json as Parse));
        let old = old.map(|d| (d.join(".dockercfg"), parse_dockercfg as Parse));
        Self { candidates: json.chain(old).collect(), cached: Mutex::new(None) }
    }

    /// Returns the node's credentials at CLOCK_BOOTTIME `now`. Reads the files again after five minutes.
    #[must_use]
    pub fn keyring(&self, now: Duration) -> Arc<Keyring> {
        let mut cached = self.cached.lock();
        if let Some((keyring, read)) = &*cached
            && now.saturating_sub(*read) < CACHED
        {
            return Arc::clone(keyring);
        }
        let keyring = Arc::new(Keyring::new(self.read()));
        *cached = Some((Arc::clone(&keyring), now));
        keyring
    }

    fn read(&self) -> Entries {
        for (path, parse) in &self.candidates {
            let bytes = match read_small(path) {
                Ok(bytes) => bytes,
                Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                    continue;
                }
                Err(e) => {
                    tracing::info!(path = %path.display(), error = %e, "failed to read credentials of the node");
                    continue;
                }
            };
            match parse(&bytes) {
                Ok(entries) => return entries,
                Err(e) => {
                    tracing::warn!(path = %path.display(), error = %e, "failed to read credentials of the node")
                }
            }
        }
        Entries::new()
    }
}

fn read_small(path: &Path) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(LARGEST.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > LARGEST {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, "too large"));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn users(files: &NodeFiles, now: u64) -> Vec<String> {
        let keyring = files.keyring(Duration::from_secs(now));
        keyring.lookup("r.test/app").into_iter().map(|c| c.username).collect()
    }

    fn write(path: &Path, user: &str, old: bool) {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let entries = format!(r#"{{"r.test": {{"username": "{user}", "password": "p"}}}}"#);
        std::fs::write(path, if old { entries } else { format!(r#"{{"auths": {entries}}}"#) }).unwrap();
    }

    #[test]
    fn the_first_file_that_can_be_read_counts() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let dirs = ConfigDirs {
            root: at("root"),
            cwd: Some(at("cwd")),
            home: Some(at("home")),
            docker_config: Some(at("docker")),
        };
        let found = || users(&NodeFiles::new(&dirs), 0);
        assert!(found().is_empty());
        for (file, user, old) in [
            ("home/.dockercfg", "home-old", true),
            ("cwd/.dockercfg", "cwd-old", true),
            ("root/.dockercfg", "root-old", true),
            ("home/.docker/config.json", "home", false),
            ("cwd/config.json", "cwd", false),
            ("root/config.json", "root", false),
            ("docker/config.json", "docker", false),
        ] {
            write(&at(file), user, old);
            assert_eq!(found(), [user]);
        }
        std::fs::write(at("docker/config.json"), "{").unwrap();
        assert_eq!(found(), ["root"], "one that is malformed is passed over");
        let huge = vec![b' '; usize::try_from(LARGEST).unwrap() + 1];
        std::fs::write(at("root/config.json"), huge).unwrap();
        assert_eq!(found(), ["cwd"]);
    }

    #[test]
    fn a_change_is_seen_after_five_minutes() {
        let dir = tempfile::tempdir().unwrap();
        let dirs = ConfigDirs { root: dir.path().to_owned(), ..ConfigDirs::default() };
        let files = NodeFiles::new(&dirs);
        write(&dir.path().join("config.json"), "a", false);
        assert_eq!(users(&files, 1), ["a"]);
        write(&dir.path().join("config.json"), "b", false);
        assert_eq!(users(&files, 300), ["a"]);
        assert_eq!(users(&files, 301), ["b"]);
    }
}
