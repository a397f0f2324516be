//! Ranges of host IDs for pods with a user namespace (pkg/kubelet/userns).
//!
//! The range of a pod is in `pods/<uid>/userns`, which is written before the sandbox is created and read
//! again at the next start. No two pods share an ID. No pod has the first range, which is the host's, or the
//! last ID of 32 bits, which means "no ID".
//!
//! A pod keeps its range until its volumes are unmounted, which may be long after another pod has its place
//! on the node. The user `kubelet` may have just as many ranges as the node has pods
//! (`pkg/kubelet/userns: MakeUserNsManager` requires no more), so a pod may find no free one. It waits, and
//! is woken when a range is released.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use pod_sync_layout::paths;
use quintlet_cri_api::v1 as cri;
use quintlet_kit::command::{Commands, Ended};
use quintlet_model::ids::PodUid;
use serde::{Deserialize, Serialize};

/// Ranges are a multiple of this many IDs, so that a pod has 16-bit user IDs.
pub const ID_UNIT: u32 = 65_536;

/// Host user whose subordinate IDs are those of pods.
const USER: &str = "kubelet";

/// Ranges per pod that the node may run. A pod keeps its range until its volumes are unmounted, which may
/// take long after another pod has its place on the node.
const RANGES_PER_POD: u32 = 4;

/// Longest run of getsubids(1), which may ask a name service over the network.
const GETSUBIDS_LIMIT: Duration = Duration::from_secs(10);

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

    /// Returns the range, if it is the same for users and groups and is usable.
    fn range(&self) -> Option<Range> {
        let [WireMapping { host_id: first, container_id: 0, length }] = self.uid_mappings[..] else {
            return None;
        };
        let whole = |n: u32| n > 0 && n.is_multiple_of(ID_UNIT);
        let last = length.checked_sub(1).and_then(|behind| first.checked_add(behind));
        let usable = whole(first) && whole(length) && last.is_some_and(|last| last < u32::MAX);
        (self.uid_mappings == self.gid_mappings && usable).then_some(Range { first, length })
    }
}

/// Host IDs of one pod.
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

/// A pod did not get a range.
#[derive(Debug, thiserror::Error)]
pub enum UserNamespaceError {
    /// All ranges are in use. The pod is woken when one is released.
    #[error(
        "could not find an empty slot to allocate a user namespace: all {ranges} are in use, \
         also by pods that wait until their volumes are unmounted"
    )]
    Exhausted {
        /// Number of ranges of the node.
        ranges: u32,
    },
    /// The file of the pod has no usable range, or that of another pod.
    #[error("{}: range of IDs is invalid or in use", .0.display())]
    Bad(PathBuf),
    /// The file of the pod cannot be read or written.
    #[error("failed to access {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Error of the file system.
        source: io::Error,
    },
}

/// Host IDs that are set aside for pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdPool {
    first: u32,
    ranges: u32,
    // IDs per range.
    ids: u32,
}

/// The subordinate IDs of the host user `kubelet` cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdPoolError {
    /// The ranges of users and groups differ, or there is more than one.
    #[error("mismatched subuids and subgids for user \"kubelet\"")]
    Mismatched,
    /// The first ID is not the beginning of a range.
    #[error("first subordinate id {first} is not a multiple of {ids}")]
    Unaligned {
        /// First of the subordinate IDs.
        first: u32,
        /// IDs per pod.
        ids: u32,
    },
    /// The last range would be shorter than the others.
    #[error("{all} subordinate ids are not a multiple of {ids}")]
    Uneven {
        /// Number of subordinate IDs.
        all: u32,
        /// IDs per pod.
        ids: u32,
    },
    /// The kernel maps no range with the ID 2^32-1.
    #[error(
        "{all} subordinate ids from {first} reach the id 4294967295, which cannot be mapped, or end after it: \
         reduce their number in /etc/subuid and /etc/subgid"
    )]
    OutOfIds {
        /// First of the subordinate IDs.
        first: u32,
        /// Number of subordinate IDs.
        all: u32,
    },
    /// The user database cannot be read.
    #[error("failed to look up user \"kubelet\": {0}")]
    User(String),
    /// The program exists, but it failed or did not end.
    #[error("failed to read the subordinate ids of user \"kubelet\" with getsubids: {0}")]
    Getsubids(String),
    /// There are fewer ranges than pods.
    #[error("{ids} subordinate ids are not enough for {pods} pods")]
    Small {
        /// Number of subordinate IDs.
        ids: u32,
        /// Largest number of pods (`maxPods`).
        pods: u32,
    },
}

impl IdPool {
    /// Returns `ranges` ranges of `ids` IDs after the host's own range, as far as 32 bits go.
    #[must_use]
    pub fn after_the_host(ranges: u32, ids: u32) -> Self {
        let fitting = u32::MAX.checked_div(ids).unwrap_or(0);
        Self { first: ids, ranges: ranges.min(fitting.saturating_sub(1)), ids }
    }

    /// Returns ranges for a node that runs at most `pods` pods: the subordinate IDs of the host user
    /// `kubelet`, if this user and the program `getsubids` exist; else [`Self::after_the_host`]
    /// (`pkg/kubelet/userns: kubeletMappings`). Blocks while getsubids runs.
    ///
    /// # Errors
    /// The user cannot be looked up, `getsubids` fails or does not end, or the subordinate IDs cannot be
    /// used. Other IDs than those of the user may belong to another user.
    pub fn of_host(pods: u32, ids: u32) -> Result<Self, IdPoolError> {
        let commands = Commands::new();
        let has_user = nix::unistd::User::from_name(USER).map(|user| user.is_some());
        let ask = |arguments: &[&str]| {
            let mut getsubids = Command::new("getsubids");
            getsubids.args(arguments);
            commands.run(getsubids, GETSUBIDS_LIMIT).and_then(Ended::success)
        };
        Self::of_user(has_user.map_err(io::Error::from), ask, pods, ids)
    }

    // `ask` runs getsubids with these arguments.
    fn of_user(
        has_user: io::Result<bool>,
        ask: impl Fn(&[&str]) -> io::Result<String>,
        pods: u32,
        ids: u32,
    ) -> Result<Self, IdPoolError> {
        let default = Self::after_the_host(pods.saturating_mul(RANGES_PER_POD), ids);
        if !has_user.map_err(|e| IdPoolError::User(e.to_string()))? {
            return Ok(default);
        }
        let failed = |e: io::Error| IdPoolError::Getsubids(e.to_string());
        let users = match ask(&[USER]) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {
                tracing::info!("getsubids is not installed, using the default ids for user namespaces");
                return Ok(default);
            }
            users => users.map_err(failed)?,
        };
        Self::of_subids(&users, &ask(&["-g", USER]).map_err(failed)?, pods, ids)
    }

    /// Parses the output of getsubids: `0: kubelet 65536 7208960`.
    fn of_subids(users: &str, groups: &str, pods: u32, ids: u32) -> Result<Self, IdPoolError> {
        let mut lines = users.lines();
        let range = lines.next().filter(|_| users.trim() == groups.trim() && lines.next().is_none());
        let mut fields =
            range.ok_or(IdPoolError::Mismatched)?.split_whitespace().skip(2).map(str::parse::<u32>);
        let (Some(Ok(first)), Some(Ok(all))) = (fields.next(), fields.next()) else {
            return Err(IdPoolError::Mismatched);
        };
        if !first.is_multiple_of(ids) || first == 0 {
            return Err(IdPoolError::Unaligned { first, ids });
        }
        if !all.is_multiple_of(ids) {
            return Err(IdPoolError::Uneven { all, ids });
        }
        // The last ID is below 2^32-1 exactly if the one behind it is an ID.
        if first.checked_add(all).is_none() {
            return Err(IdPoolError::OutOfIds { first, all });
        }
        let ranges = all.checked_div(ids).unwrap_or(0);
        if ranges < pods {
            Err(IdPoolError::Small { ids: all, pods })
        } else {
            Ok(Self { first, ranges, ids })
        }
    }

    fn ranges(self) -> impl Iterator<Item = Range> {
        // Both constructors keep all ranges within u32.
        let firsts = (0..self.ranges).filter_map(move |i| self.first.checked_add(i.checked_mul(self.ids)?));
        firsts.map(move |first| Range { first, length: self.ids })
    }
}

/// Allocates ranges of host IDs to pods.
#[derive(Debug)]
pub struct UserNamespaces {
    root: PathBuf,
    pool: IdPool,
    // Held while files are accessed.
    taken: Mutex<Vec<(Range, PodUid)>>,
    // Pods that found no free range.
    waiting: Mutex<BTreeSet<PodUid>>,
    releases: AtomicU64,
}

impl UserNamespaces {
    /// Creates the allocator for the pods below `root`. Ranges on disk are in use, whatever their length.
    #[must_use]
    pub fn new(root: &Path, pool: IdPool) -> Self {
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
                Err(e) => tracing::warn!(pod.uid = %uid, error = %e, "failed to read user namespace of pod"),
            }
        }
        Self {
            root: root.to_owned(),
            pool,
            taken: Mutex::new(taken),
            waiting: Mutex::default(),
            releases: AtomicU64::new(0),
        }
    }

    /// Returns the number of releases. A pod that found no free range tries again when it has changed. Does
    /// not block.
    pub fn releases(&self) -> u64 {
        self.releases.load(Ordering::Relaxed)
    }

    /// Returns the mappings of a pod, which are allocated on first use. Reads and writes a file.
    pub fn mappings(&self, uid: &PodUid) -> Result<cri::UserNamespace, UserNamespaceError> {
        let path = paths::pod_dir(&self.root, uid).join("userns");
        let mut taken = self.taken.lock();
        if let Some(range) = read(&path)? {
            if taken.contains(&(range, uid.clone())) {
                return Ok(range.namespace());
            }
            if !is_free(&taken, range) {
                return Err(UserNamespaceError::Bad(path));
            }
            taken.push((range, uid.clone()));
            return Ok(range.namespace());
        }
        let Some(range) = self.pool.ranges().find(|r| is_free(&taken, *r)) else {
            self.waiting.lock().insert(uid.clone());
            return Err(UserNamespaceError::Exhausted { ranges: self.pool.ranges });
        };
        let bytes = serde_json::to_vec(&WireFile::of(range)).unwrap_or_default();
        quintlet_kit::atomic_file::write_durable(&path, &bytes, 0o644)
            .map_err(|source| UserNamespaceError::Io { path, source })?;
        taken.push((range, uid.clone()));
        Ok(range.namespace())
    }

    /// Releases the range of a pod whose containers are gone. Returns the pods that waited for a range, which
    /// the caller wakes. Removes a file.
    #[must_use]
    pub fn release(&self, uid: &PodUid) -> BTreeSet<PodUid> {
        let mut taken = self.taken.lock();
        self.waiting.lock().remove(uid);
        let path = paths::pod_dir(&self.root, uid).join("userns");
        if let Err(e) = std::fs::remove_file(&path)
            && e.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(path = %path.display(), error = %e, "user namespace not released");
            return BTreeSet::new();
        }
        let before = taken.len();
        taken.retain(|(_, owner)| owner != uid);
        if taken.len() == before {
            return BTreeSet::new();
        }
        self.releases.fetch_add(1, Ordering::Relaxed);
        // Those that find no range again are added again.
        std::mem::take(&mut *self.waiting.lock())
    }
}

fn is_free(taken: &[(Range, PodUid)], range: Range) -> bool {
    !taken.iter().any(|(other, _)| other.overlaps(range))
}

fn read(path: &Path) -> Result<Option<Range>, UserNamespaceError> {
    match std::fs::read(path) {
        Ok(bytes) => {
            let file = serde_json::from_slice::<WireFile>(&bytes).ok();
            let range = file.and_then(|f| f.range());
            range.map(Some).ok_or_else(|| UserNamespaceError::Bad(path.to_owned()))
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(UserNamespaceError::Io { path: path.to_owned(), source }),
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
        let make = || UserNamespaces::new(dir.path(), IdPool::after_the_host(3, ID_UNIT));
        let all = make();
        let [a, b, c, d] = ["a", "b", "c", "d"].map(|n| pod(dir.path(), n));
        assert_eq!([&a, &b, &c].map(|u| first(&all, u)), [65_536, 131_072, 196_608]);
        assert_eq!(first(&all, &b), 131_072);
        assert!(matches!(all.mappings(&d), Err(UserNamespaceError::Exhausted { ranges: 3 })));
        let all = make();
        assert!(
            matches!(all.mappings(&d), Err(UserNamespaceError::Exhausted { .. })),
            "those on disk are taken"
        );
        let _woken = all.release(&b);
        assert_eq!(first(&all, &d), 131_072);
        assert_eq!(first(&all, &a), 65_536);
        let text = std::fs::read_to_string(paths::pod_dir(dir.path(), &a).join("userns")).unwrap();
        let mapping = r#"[{"hostId":65536,"containerId":0,"length":65536}]"#;
        assert_eq!(text, format!(r#"{{"uidMappings":{mapping},"gidMappings":{mapping}}}"#));
    }

    #[test]
    fn a_pod_gets_the_configured_number_of_ids_and_keeps_an_earlier_range() {
        let dir = tempfile::tempdir().unwrap();
        let [old, a, b] = ["old", "a", "b"].map(|n| pod(dir.path(), n));
        let all = UserNamespaces::new(dir.path(), IdPool::after_the_host(2, ID_UNIT));
        assert_eq!(first(&all, &old), ID_UNIT);
        let all = UserNamespaces::new(dir.path(), IdPool::after_the_host(3, 2 * ID_UNIT));
        assert_eq!(first(&all, &old), ID_UNIT);
        let ids = |uid: &PodUid| {
            let n = all.mappings(uid).unwrap();
            (n.uids[0].host_id, n.uids[0].length)
        };
        assert_eq!([&a, &b].map(ids), [(2 * ID_UNIT, 2 * ID_UNIT), (4 * ID_UNIT, 2 * ID_UNIT)]);
        let _woken = all.release(&old);
        let all = UserNamespaces::new(dir.path(), IdPool::after_the_host(9, ID_UNIT));
        let more = ["c", "d", "e"].map(|n| first(&all, &pod(dir.path(), n)));
        assert_eq!(
            more,
            [ID_UNIT, 6 * ID_UNIT, 7 * ID_UNIT],
            "what is taken with another length is not given again"
        );
        assert_eq!(IdPool::after_the_host(110, 1 << 30).ranges, 2, "as far as ids go");
    }

    #[test]
    fn pods_without_a_range_are_woken_by_each_release_until_they_have_one_or_are_gone() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, c, d, e] = ["a", "b", "c", "d", "e"].map(|n| pod(dir.path(), n));
        let all = UserNamespaces::new(dir.path(), IdPool::after_the_host(2, ID_UNIT));
        let _both = [&a, &b].map(|uid| first(&all, uid));
        for waiting in [&c, &d, &e] {
            assert!(all.mappings(waiting).is_err());
        }
        assert!(all.release(&e).is_empty() && all.releases() == 0, "e had no range, and waits no longer");
        assert_eq!(all.release(&a), [c.clone(), d.clone()].into());
        assert_eq!(all.releases(), 1);
        let _taken = first(&all, &c);
        assert!(all.mappings(&d).is_err());
        assert!(all.release(&a).is_empty(), "nothing was released");
        assert_eq!(all.release(&b), [d.clone()].into());
        let _taken = first(&all, &d);
        assert!(all.release(&c).is_empty(), "no pod waits");
    }

    #[test]
    fn an_invalid_or_conflicting_range_file_affects_only_its_pod() {
        let dir = tempfile::tempdir().unwrap();
        let [good, torn, host, copy] = ["good", "torn", "host", "copy"].map(|n| pod(dir.path(), n));
        let at = |u: &PodUid| paths::pod_dir(dir.path(), u).join("userns");
        let all = UserNamespaces::new(dir.path(), IdPool::after_the_host(5, ID_UNIT));
        assert_eq!(first(&all, &good), 65_536);
        std::fs::write(at(&torn), "{").unwrap();
        std::fs::write(
            at(&host),
            serde_json::to_vec(&WireFile::of(Range { first: 0, length: ID_UNIT })).unwrap(),
        )
        .unwrap();
        std::fs::copy(at(&good), at(&copy)).unwrap();
        for bad in [&torn, &host, &copy] {
            assert!(matches!(all.mappings(bad), Err(UserNamespaceError::Bad(_))), "{bad}");
        }
        assert_eq!(first(&all, &good), 65_536);
    }

    #[test]
    fn an_unusable_answer_about_the_kubelet_user_is_an_error_and_only_a_missing_one_means_the_default() {
        let default = IdPool { first: ID_UNIT, ranges: 2 * RANGES_PER_POD, ids: ID_UNIT };
        let own = || Ok("0: kubelet 131072 131072\n".to_owned());
        let missing = || Err(io::Error::from(io::ErrorKind::NotFound));
        let failing = || Err(io::Error::other("the command failed: exit status: 1"));
        let hanging = || Err(io::Error::new(io::ErrorKind::TimedOut, "the command did not end in time"));
        let failed = || Err(IdPoolError::Getsubids("the command failed: exit status: 1".to_owned()));
        let hung = || Err(IdPoolError::Getsubids("the command did not end in time".to_owned()));
        type Answer<'a> = &'a dyn Fn() -> io::Result<String>;
        type Case<'a> = (&'a str, io::Result<bool>, Answer<'a>, Answer<'a>, Result<IdPool, IdPoolError>);
        let never: Answer<'_> = &|| panic!("getsubids does not run");
        // (name, user exists, answer for users, answer for groups) and the pool.
        let cases: [Case<'_>; 8] = [
            ("no user", Ok(false), never, never, Ok(default)),
            ("no getsubids", Ok(true), &missing, never, Ok(default)),
            ("both", Ok(true), &own, &own, Ok(IdPool { first: 131_072, ranges: 2, ids: ID_UNIT })),
            ("getsubids fails", Ok(true), &failing, never, failed()),
            ("getsubids hangs", Ok(true), &hanging, never, hung()),
            ("it fails for groups", Ok(true), &own, &failing, failed()),
            ("it hangs for groups", Ok(true), &own, &hanging, hung()),
            (
                "no user database",
                Err(io::Error::other("busy")),
                never,
                never,
                Err(IdPoolError::User("busy".to_owned())),
            ),
        ];
        for (name, has_user, users, groups, want) in cases {
            let ask = |arguments: &[&str]| match arguments {
                ["kubelet"] => users(),
                ["-g", "kubelet"] => groups(),
                other => panic!("{other:?}"),
            };
            assert_eq!(IdPool::of_user(has_user, ask, 2, ID_UNIT), want, "{name}");
        }
    }

    #[test]
    fn pods_that_wait_for_their_unmounts_leave_ranges_for_as_many_others() {
        let dir = tempfile::tempdir().unwrap();
        let pool = IdPool::of_user(Ok(false), |_| panic!("no user"), 3, ID_UNIT).unwrap();
        let all = UserNamespaces::new(dir.path(), pool);
        let leaving: Vec<_> = (0..3).map(|n| first(&all, &pod(dir.path(), &format!("leaving{n}")))).collect();
        let coming: Vec<_> = (0..3).map(|n| first(&all, &pod(dir.path(), &format!("coming{n}")))).collect();
        assert!(leaving.iter().all(|range| !coming.contains(range)), "{leaving:?} {coming:?}");
    }

    #[test]
    fn no_range_has_the_last_id() {
        let dir = tempfile::tempdir().unwrap();
        let last = Range { first: u32::MAX - (ID_UNIT - 1), length: ID_UNIT };
        let owner = pod(dir.path(), "a");
        let bytes = serde_json::to_vec(&WireFile::of(last)).unwrap();
        std::fs::write(paths::pod_dir(dir.path(), &owner).join("userns"), bytes).unwrap();
        let id_pool = |first: u32, ids: u32| {
            let line = format!("0: kubelet {first} {ids}\n");
            IdPool::of_subids(&line, &line, 1, ID_UNIT)
        };
        let first = u32::MAX - (2 * ID_UNIT - 1);
        let pool = id_pool(first, ID_UNIT).unwrap();
        assert_eq!(pool.ranges().collect::<Vec<_>>(), [Range { first, length: ID_UNIT }]);
        for (first, all) in [(first, 2 * ID_UNIT), (last.first, ID_UNIT), (first, 3 * ID_UNIT)] {
            assert_eq!(id_pool(first, all), Err(IdPoolError::OutOfIds { first, all }), "{first} {all}");
        }
        let all = UserNamespaces::new(dir.path(), pool);
        assert!(
            matches!(all.mappings(&owner), Err(UserNamespaceError::Bad(_))),
            "a file with the last range"
        );
        let default = IdPool::after_the_host(u32::MAX, ID_UNIT);
        assert!(default.ranges().all(|range| !range.overlaps(last)));
    }

    #[test]
    fn the_id_pool_of_the_kubelet_user_must_be_usable() {
        let line = |first: u32, ids: u32| format!("0: kubelet {first} {ids}\n");
        let ok = line(131_072, 131_072);
        for (users, groups, want) in [
            (ok.clone(), ok.clone(), Ok(IdPool { first: 131_072, ranges: 2, ids: ID_UNIT })),
            (ok.clone(), line(65_536, 131_072), Err(IdPoolError::Mismatched)),
            (format!("{ok}{ok}"), format!("{ok}{ok}"), Err(IdPoolError::Mismatched)),
            (String::new(), String::new(), Err(IdPoolError::Mismatched)),
            (
                line(100_000, 131_072),
                line(100_000, 131_072),
                Err(IdPoolError::Unaligned { first: 100_000, ids: ID_UNIT }),
            ),
            (
                line(131_072, 131_073),
                line(131_072, 131_073),
                Err(IdPoolError::Uneven { all: 131_073, ids: ID_UNIT }),
            ),
            (
                line(u32::MAX - 65_535, 131_072),
                line(u32::MAX - 65_535, 131_072),
                Err(IdPoolError::OutOfIds { first: u32::MAX - 65_535, all: 131_072 }),
            ),
            (line(65_536, 65_536), line(65_536, 65_536), Err(IdPoolError::Small { ids: 65_536, pods: 2 })),
        ] {
            assert_eq!(IdPool::of_subids(&users, &groups, 2, ID_UNIT), want, "{users}");
        }
    }
}
