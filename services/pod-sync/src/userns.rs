//! Ranges of ids for pods with a user namespace of their own (`pkg/kubelet/userns`).
//!
//! A pod's range is in `pods/<uid>/userns`, written before anything of the pod is made: it outlives this process and is
//! read again at start. No two pods share an id, and none has the host's first range.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use k8s_cri::v1 as cri;
use parking_lot::Mutex;
use pod_sync_cri_config::paths;
use quintlet_model::ids::PodUid;
use serde::{Deserialize, Serialize};

/// Ids come in units of this many: what 16 bits of user ids need.
pub const UNIT: u32 = 65_536;

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
    fn of(range: Range) -> Self {
        let all = vec![WireMapping { host_id: range.first, container_id: 0, length: range.length }];
        Self { uid_mappings: all.clone(), gid_mappings: all }
    }

    // The one range of both, if it is such a file at all.
    fn range(&self) -> Option<Range> {
        let [WireMapping { host_id: first, container_id: 0, length }] = self.uid_mappings[..] else {
            return None;
        };
        let whole = |n: u32| n > 0 && n.is_multiple_of(UNIT);
        let last = length.checked_sub(1).and_then(|behind| first.checked_add(behind));
        let usable = whole(first) && whole(length) && last.is_some();
        (self.uid_mappings == self.gid_mappings && usable).then_some(Range { first, length })
    }
}

/// Ids of one pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u32,
    length: u32,
}

impl Range {
    fn overlaps(self, other: Self) -> bool {
        let last = |r: Self| r.first.saturating_add(r.length.saturating_sub(1));
        self.first <= last(other) && other.first <= last(self)
    }

    fn namespace(self) -> cri::UserNamespace {
        let all = vec![cri::IdMapping { host_id: self.first, container_id: 0, length: self.length }];
        cri::UserNamespace { mode: cri::NamespaceMode::Pod as i32, uids: all.clone(), gids: all }
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
    // Of one range.
    ids: u32,
}

/// The ids of the host user `kubelet` cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPool {
    /// Users and groups differ, or there is more than one range.
    #[error("mismatched subuids and subgids for user \"kubelet\"")]
    Mismatched,
    /// The range is not aligned.
    #[error("first subordinate id {first} is not a multiple of {ids}")]
    Unaligned {
        /// First id.
        first: u32,
        /// Ids of a pod.
        ids: u32,
    },
    /// There are ids left over.
    #[error("{all} subordinate ids are not a multiple of {ids}")]
    Uneven {
        /// Ids there are.
        all: u32,
        /// Ids of a pod.
        ids: u32,
    },
    /// The range ends behind the largest id.
    #[error("{all} subordinate ids from {first} do not fit into 32 bits")]
    OutOfIds {
        /// First id.
        first: u32,
        /// Ids there are.
        all: u32,
    },
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
    /// One range of `ids` for each of `pods`, right after the host's own, as far as ids go.
    #[must_use]
    pub fn after_the_host(pods: u32, ids: u32) -> Self {
        let fitting = u32::MAX.checked_div(ids).unwrap_or(0);
        Self { first: ids, ranges: pods.min(fitting.saturating_sub(1)), ids }
    }

    /// What is set aside for the host user `kubelet`, where there is one and `getsubids` can tell; else
    /// [`Self::after_the_host`]. Runs programs.
    ///
    /// # Errors
    /// What is set aside cannot be used.
    pub fn of_host(pods: u32, ids: u32) -> Result<Self, BadPool> {
        let kubelet = nix::unistd::User::from_name("kubelet").ok().flatten();
        let ask = |arguments: &[&str]| {
            let output = Command::new("getsubids").args(arguments).output().ok()?;
            output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
        };
        match (kubelet, ask(&["kubelet"]), ask(&["-g", "kubelet"])) {
            (Some(_), Some(users), Some(groups)) => Self::of_subids(&users, &groups, pods, ids),
            _ => Ok(Self::after_the_host(pods, ids)),
        }
    }

    // The output of getsubids: `0: kubelet 65536 7208960`.
    fn of_subids(users: &str, groups: &str, pods: u32, ids: u32) -> Result<Self, BadPool> {
        let mut lines = users.lines();
        let range = lines.next().filter(|_| users.trim() == groups.trim() && lines.next().is_none());
        let mut fields = range.ok_or(BadPool::Mismatched)?.split_whitespace().skip(2).map(str::parse::<u32>);
        let (Some(Ok(first)), Some(Ok(all))) = (fields.next(), fields.next()) else {
            return Err(BadPool::Mismatched);
        };
        if !first.is_multiple_of(ids) || first == 0 {
            return Err(BadPool::Unaligned { first, ids });
        }
        if !all.is_multiple_of(ids) {
            return Err(BadPool::Uneven { all, ids });
        }
        if all.checked_sub(1).is_some_and(|behind| first.checked_add(behind).is_none()) {
            return Err(BadPool::OutOfIds { first, all });
        }
        let ranges = all.checked_div(ids).unwrap_or(0);
        if ranges < pods { Err(BadPool::Small { ids: all, pods }) } else { Ok(Self { first, ranges, ids }) }
    }

    fn ranges(self) -> impl Iterator<Item = Range> {
        // No range is outside of u32: each way of making a pool sees to it.
        let firsts = (0..self.ranges).filter_map(move |i| self.first.checked_add(i.checked_mul(self.ids)?));
        firsts.map(move |first| Range { first, length: self.ids })
    }
}

/// Gives out ranges.
#[derive(Debug)]
pub struct UserNamespaces {
    root: PathBuf,
    pool: Pool,
    taken: Mutex<Vec<(Range, PodUid)>>,
}

impl UserNamespaces {
    /// Ranges of `pool` for the pods below `root`; those on disk are taken, whatever their length.
    #[must_use]
    pub fn new(root: &Path, pool: Pool) -> Self {
        let mut taken = Vec::new();
        for entry in std::fs::read_dir(paths::pods_dir(root)).into_iter().flatten().flatten() {
            let Some(uid) = entry.file_name().to_str().and_then(|n| PodUid::parse(n).ok()) else { continue };
            match read(&entry.path().join("userns")) {
                Ok(Some(range)) => {
                    if is_free(&taken, range) {
                        taken.push((range, uid));
                    }
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
            if taken.contains(&(range, uid.clone())) {
                return Ok(range.namespace());
            }
            if !is_free(&taken, range) {
                return Err(NoRange::Bad(path));
            }
            taken.push((range, uid.clone()));
            return Ok(range.namespace());
        }
        let range = self.pool.ranges().find(|r| is_free(&taken, *r)).ok_or(NoRange::Exhausted)?;
        let bytes = serde_json::to_vec(&WireFile::of(range)).unwrap_or_default();
        quintlet_kit::atomic_file::write_durable(&path, &bytes, 0o644)
            .map_err(|source| NoRange::Io { path, source })?;
        taken.push((range, uid.clone()));
        Ok(range.namespace())
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
        taken.retain(|(_, owner)| owner != uid);
    }
}

fn is_free(taken: &[(Range, PodUid)], range: Range) -> bool {
    !taken.iter().any(|(other, _)| other.overlaps(range))
}

fn read(path: &Path) -> Result<Option<Range>, NoRange> {
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
        let make = || UserNamespaces::new(dir.path(), Pool::after_the_host(3, UNIT));
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
    fn a_pod_has_as_many_ids_as_are_set_and_one_of_another_setting_keeps_those_it_has() {
        let dir = tempfile::tempdir().unwrap();
        let [old, a, b] = ["old", "a", "b"].map(|n| pod(dir.path(), n));
        let all = UserNamespaces::new(dir.path(), Pool::after_the_host(2, UNIT));
        assert_eq!(first(&all, &old), UNIT);
        let all = UserNamespaces::new(dir.path(), Pool::after_the_host(3, 2 * UNIT));
        assert_eq!(first(&all, &old), UNIT);
        let ids = |uid: &PodUid| {
            let n = all.mappings(uid).unwrap();
            (n.uids[0].host_id, n.uids[0].length)
        };
        assert_eq!([&a, &b].map(ids), [(2 * UNIT, 2 * UNIT), (4 * UNIT, 2 * UNIT)]);
        all.release(&old);
        let all = UserNamespaces::new(dir.path(), Pool::after_the_host(9, UNIT));
        let more = ["c", "d", "e"].map(|n| first(&all, &pod(dir.path(), n)));
        assert_eq!(more, [UNIT, 6 * UNIT, 7 * UNIT], "what is taken with another length is not given again");
        assert_eq!(Pool::after_the_host(110, 1 << 30).ranges, 2, "as far as ids go");
    }

    #[test]
    fn a_file_that_is_no_range_or_anothers_harms_only_its_pod() {
        let dir = tempfile::tempdir().unwrap();
        let [good, torn, host, copy] = ["good", "torn", "host", "copy"].map(|n| pod(dir.path(), n));
        let at = |u: &PodUid| paths::pod_dir(dir.path(), u).join("userns");
        let all = UserNamespaces::new(dir.path(), Pool::after_the_host(5, UNIT));
        assert_eq!(first(&all, &good), 65_536);
        std::fs::write(at(&torn), "{").unwrap();
        std::fs::write(
            at(&host),
            serde_json::to_vec(&WireFile::of(Range { first: 0, length: UNIT })).unwrap(),
        )
        .unwrap();
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
            (ok.clone(), ok.clone(), Ok(Pool { first: 131_072, ranges: 2, ids: UNIT })),
            (ok.clone(), line(65_536, 131_072), Err(BadPool::Mismatched)),
            (format!("{ok}{ok}"), format!("{ok}{ok}"), Err(BadPool::Mismatched)),
            (String::new(), String::new(), Err(BadPool::Mismatched)),
            (
                line(100_000, 131_072),
                line(100_000, 131_072),
                Err(BadPool::Unaligned { first: 100_000, ids: UNIT }),
            ),
            (
                line(131_072, 131_073),
                line(131_072, 131_073),
                Err(BadPool::Uneven { all: 131_073, ids: UNIT }),
            ),
            (
                line(u32::MAX - 65_535, 131_072),
                line(u32::MAX - 65_535, 131_072),
                Err(BadPool::OutOfIds { first: u32::MAX - 65_535, all: 131_072 }),
            ),
            (line(65_536, 65_536), line(65_536, 65_536), Err(BadPool::Small { ids: 65_536, pods: 2 })),
        ] {
            assert_eq!(Pool::of_subids(&users, &groups, 2, UNIT), want, "{users}");
        }
    }
}
