//! Ranges of ids for pods with a user namespace of their own (pod-sync.md §6.7, pkg/kubelet/userns).
//!
//! A pod's range is in `pods/<uid>/userns`, written before anything of the pod is made: it outlives this process and is
//! read again at start. No two pods share an id, and none has the host's first range.

use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_cri::v1 as cri;
use parking_lot::Mutex;
use quintlet_model::ids::PodUid;
use serde::{Deserialize, Serialize};

use crate::build::paths;

/// Ids of a pod, and what ranges are aligned to (`userNamespaces.idsPerPod`).
pub const IDS_PER_POD: u32 = 65_536;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireMapping {
    host_id: u32,
    container_id: u32,
    length: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WireFile {
    uid_mappings: Vec<WireMapping>,
    gid_mappings: Vec<WireMapping>,
}

impl WireFile {
    fn of(first: u32) -> Self {
        let all = vec![WireMapping { host_id: first, container_id: 0, length: IDS_PER_POD }];
        Self { uid_mappings: all.clone(), gid_mappings: all }
    }

    // The one range of both, if it is such a file at all.
    fn range(&self) -> Option<u32> {
        let [WireMapping { host_id, container_id: 0, length: IDS_PER_POD }] = self.uid_mappings[..] else {
            return None;
        };
        (self.uid_mappings == self.gid_mappings && host_id % IDS_PER_POD == 0 && host_id > 0)
            .then_some(host_id)
    }
}

/// A pod has no range.
#[derive(Debug, thiserror::Error)]
pub enum NoRange {
    /// All are taken.
    #[error("could not find an empty slot to allocate a user namespace")]
    Exhausted,
    /// What is on disk is not a range, or another pod's.
    #[error("{}: not a range of ids, or one that is taken", .0.display())]
    Bad(PathBuf),
    /// It cannot be read or written.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// The host's ids that are for pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    first: u32,
    ranges: u32,
}

/// The ids of the host user `kubelet` cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPool {
    /// Users and groups differ, or there is more than one range.
    #[error("mismatched subuids and subgids for user \"kubelet\"")]
    Mismatched,
    /// The range is not aligned.
    #[error("first subordinate id {0} is not a multiple of {IDS_PER_POD}")]
    Unaligned(u32),
    /// The range is too small.
    #[error("{ids} subordinate ids are not enough for {pods} pods")]
    Small {
        /// Ids there are.
        ids: u32,
        /// Pods the node takes.
        pods: u32,
    },
}

impl Pool {
    /// One range for each of `pods`, right after the host's own.
    #[must_use]
    pub fn after_the_host(pods: u32) -> Self {
        Self { first: IDS_PER_POD, ranges: pods }
    }

    /// What is set aside for the host user `kubelet`, where there is one and `getsubids` can tell; else
    /// [`Self::after_the_host`]. Runs programs.
    ///
    /// # Errors
    /// What is set aside cannot be used.
    pub fn of_host(pods: u32) -> Result<Self, BadPool> {
        let kubelet = nix::unistd::User::from_name("kubelet").ok().flatten();
        let ask = |arguments: &[&str]| {
            let output = Command::new("getsubids").args(arguments).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        };
        match (kubelet, ask(&["kubelet"]), ask(&["-g", "kubelet"])) {
            (Some(_), Some(users), Some(groups)) => Self::of_subids(&users, &groups, pods),
            _ => Ok(Self::after_the_host(pods)),
        }
    }

    // The output of getsubids: `0: kubelet 65536 7208960`.
    fn of_subids(users: &str, groups: &str, pods: u32) -> Result<Self, BadPool> {
        let mut lines = users.lines();
        let range = lines.next().filter(|_| users.trim() == groups.trim() && lines.next().is_none());
        let mut fields = range.ok_or(BadPool::Mismatched)?.split_whitespace().skip(2).map(str::parse::<u32>);
        let (Some(Ok(first)), Some(Ok(ids))) = (fields.next(), fields.next()) else {
            return Err(BadPool::Mismatched);
        };
        if first % IDS_PER_POD != 0 || first == 0 {
            return Err(BadPool::Unaligned(first));
        }
        let ranges = ids / IDS_PER_POD;
        if ranges < pods { Err(BadPool::Small { ids, pods }) } else { Ok(Self { first, ranges }) }
    }
}

/// Gives out ranges.
#[derive(Debug)]
pub struct UserNamespaces {
    root: PathBuf,
    pool: Pool,
    taken: Mutex<HashMap<u32, PodUid>>,
}

impl UserNamespaces {
    /// Ranges of `pool` for the pods below `root`; those on disk are taken.
    #[must_use]
    pub fn new(root: &Path, pool: Pool) -> Self {
        let mut taken = HashMap::new();
        for entry in std::fs::read_dir(paths::pods_dir(root)).into_iter().flatten().flatten() {
            let Some(uid) = entry.file_name().to_str().and_then(|n| PodUid::parse(n).ok()) else { continue };
            match read(&entry.path().join("userns")) {
                Ok(Some(range)) => {
                    taken.entry(range).or_insert(uid);
                }
                Ok(None) => {}
                Err(e) => tracing::warn!(pod.uid = %uid, error = %e, "user namespace of a pod not read"),
            }
        }
        Self { root: root.to_owned(), pool, taken: Mutex::new(taken) }
    }

    /// The mappings of a pod, made on first use. Reads and writes a file.
    ///
    /// # Errors
    /// See [`NoRange`].
    pub fn mappings(&self, uid: &PodUid) -> Result<cri::UserNamespace, NoRange> {
        let path = paths::pod_dir(&self.root, uid).join("userns");
        let mut taken = self.taken.lock();
        if let Some(range) = read(&path)? {
            if taken.entry(range).or_insert_with(|| uid.clone()) != uid {
                return Err(NoRange::Bad(path));
            }
            return Ok(namespace(range));
        }
        let free =
            (0..self.pool.ranges).map(|i| self.pool.first + i * IDS_PER_POD).find(|r| !taken.contains_key(r));
        let range = free.ok_or(NoRange::Exhausted)?;
        let bytes = serde_json::to_vec(&WireFile::of(range)).unwrap_or_default();
        quintlet_kit::atomic_file::write_durable(&path, &bytes, 0o644)
            .map_err(|source| NoRange::Io { path, source })?;
        taken.insert(range, uid.clone());
        Ok(namespace(range))
    }

    /// Gives a pod's range back; its containers are gone.
    pub fn release(&self, uid: &PodUid) {
        let mut taken = self.taken.lock();
        let path = paths::pod_dir(&self.root, uid).join("userns");
        if let Err(e) = std::fs::remove_file(&path)
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), error = %e, "user namespace not released");
            return;
        }
        taken.retain(|_, owner| owner != uid);
    }
}

fn read(path: &Path) -> Result<Option<u32>, NoRange> {
    match std::fs::read(path) {
        Ok(bytes) => {
            let file = serde_json::from_slice::<WireFile>(&bytes).ok();
            let range = file.and_then(|f| f.range());
            range.map(Some).ok_or_else(|| NoRange::Bad(path.to_owned()))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(NoRange::Io { path: path.to_owned(), source }),
    }
}

fn namespace(first: u32) -> cri::UserNamespace {
    let all = vec![cri::IdMapping { host_id: first, container_id: 0, length: IDS_PER_POD }];
    cri::UserNamespace { mode: cri::NamespaceMode::Pod as i32, uids: all.clone(), gids: all }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> PodUid {
        PodUid::parse(text).unwrap()
    }

    fn pod(root: &Path, name: &str) -> PodUid {
        std::fs::create_dir_all(paths::pod_dir(root, &uid(name))).unwrap();
        uid(name)
    }

    fn first(all: &UserNamespaces, uid: &PodUid) -> u32 {
        let n = all.mappings(uid).unwrap();
        assert_eq!((n.uids.len(), &n.uids, n.mode), (1, &n.gids, cri::NamespaceMode::Pod as i32));
        assert_eq!((n.uids[0].container_id, n.uids[0].length), (0, 65_536));
        n.uids[0].host_id
    }

    #[test]
    fn each_pod_has_the_lowest_free_range_and_keeps_it_over_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let make = || UserNamespaces::new(dir.path(), Pool::after_the_host(3));
        let all = make();
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|n| pod(dir.path(), n));
        assert_eq!([&a, &b, &c].map(|u| first(&all, u)), [65_536, 131_072, 196_608]);
        assert_eq!(first(&all, &b), 131_072);
        assert!(matches!(all.mappings(&d), Err(NoRange::Exhausted)));
        let all = make();
        assert!(matches!(all.mappings(&d), Err(NoRange::Exhausted)), "those on disk are taken");
        all.release(&b);
        assert_eq!(first(&all, &d), 131_072);
        assert_eq!(first(&all, &a), 65_536);
        let text = std::fs::read_to_string(paths::pod_dir(dir.path(), &a).join("userns")).unwrap();
        let mapping = r#"[{"hostId":65536,"containerId":0,"length":65536}]"#;
        assert_eq!(text, format!(r#"{{"uidMappings":{mapping},"gidMappings":{mapping}}}"#));
    }

    #[test]
    fn a_file_that_is_no_range_or_anothers_harms_only_its_pod() {
        let dir = tempfile::tempdir().unwrap();
        let [good, torn, host, copy] = ["good", "torn", "host", "copy"].map(|n| pod(dir.path(), n));
        let at = |u: &PodUid| paths::pod_dir(dir.path(), u).join("userns");
        let all = UserNamespaces::new(dir.path(), Pool::after_the_host(5));
        assert_eq!(first(&all, &good), 65_536);
        std::fs::write(at(&torn), "{").unwrap();
        std::fs::write(at(&host), serde_json::to_vec(&WireFile::of(0)).unwrap()).unwrap();
        std::fs::copy(at(&good), at(&copy)).unwrap();
        for bad in [&torn, &host, &copy] {
            assert!(matches!(all.mappings(bad), Err(NoRange::Bad(_))), "{bad}");
        }
        assert_eq!(first(&all, &good), 65_536);
    }

    #[test]
    fn what_is_set_aside_for_the_host_user_must_be_usable() {
        let line = |first: u32, ids: u32| format!("0: kubelet {first} {ids}\n");
        let ok = line(131_072, 131_072);
        for (users, groups, want) in [
            (ok.clone(), ok.clone(), Ok(Pool { first: 131_072, ranges: 2 })),
            (ok.clone(), line(65_536, 131_072), Err(BadPool::Mismatched)),
            (format!("{ok}{ok}"), format!("{ok}{ok}"), Err(BadPool::Mismatched)),
            (String::new(), String::new(), Err(BadPool::Mismatched)),
            (line(100_000, 131_072), line(100_000, 131_072), Err(BadPool::Unaligned(100_000))),
            (line(65_536, 65_536), line(65_536, 65_536), Err(BadPool::Small { ids: 65_536, pods: 2 })),
        ] {
            assert_eq!(Pool::of_subids(&users, &groups, 2), want, "{users}");
        }
    }
}
