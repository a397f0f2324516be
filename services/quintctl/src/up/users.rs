//! The user of each service, and the owner, group and mode of the directory of each socket.
//! docs/design/sockets.md has the table.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use quintlet_kit::atomic_file::Owner;
use quintlet_kit::beneath::Dir;

use super::args::UpArgs;
use super::names::{NODE_API, POD_SYNC};
use crate::run_as::User;

/// The users of the services that do not need root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Users {
    pleg: u32,
    probe: u32,
    reporter: u32,
    node_api: u32,
    /// Group of the services that watch the health of others.
    watch: u32,
}

/// User and group ID of root.
const ROOT: u32 = 0;
/// Permits the owner and the group to enter. New files belong to the group of the directory.
const FOR_GROUP: u32 = 0o2750;
const FOR_OWNER: u32 = 0o700;
const FOR_ALL: u32 = 0o755;

/// Directory of the copies of files that the services may not read themselves, below the run directory.
pub(super) const COPIES_DIR: &str = "handed";

impl Users {
    pub(super) fn of(args: &UpArgs) -> Self {
        Self {
            pleg: args.pleg_uid,
            probe: args.probe_uid,
            reporter: args.reporter_uid,
            node_api: args.node_api_uid,
            watch: args.watch_gid,
        }
    }

    pub(super) fn uid(&self, service: &str) -> u32 {
        match service {
            "pleg-service" => self.pleg,
            "probe-service" => self.probe,
            "status-reporter" => self.reporter,
            NODE_API => self.node_api,
            _ => ROOT,
        }
    }

    /// Returns the user of a service, or none for root.
    pub(super) fn user(&self, service: &str) -> Option<User> {
        let uid = self.uid(service);
        let watches = ["status-reporter", NODE_API].contains(&service);
        let groups = if watches { vec![self.watch] } else { Vec::new() };
        (uid != ROOT).then_some(User { uid, gid: uid, groups })
    }

    /// Returns the users that may connect to sockets of cri-proxy, with the name of the socket.
    pub(super) fn cri_users(&self, node_api: bool) -> Vec<(&'static str, u32)> {
        let all = [("read", self.pleg), ("probe", self.probe), ("node-api", self.node_api)];
        all.into_iter().filter(|(socket, uid)| *uid != ROOT && (node_api || *socket != NODE_API)).collect()
    }

    /// Returns the users that may only call the health and metrics methods of a service.
    pub(super) fn observers(&self, service: &str, node_api: bool) -> Vec<u32> {
        let (reporter, api) = (Some(self.reporter), Some(self.node_api).filter(|_| node_api));
        let observers = match service {
            "pleg-service" => [reporter, api],
            "probe-service" | "status-reporter" => [None, api],
            POD_SYNC => [reporter, None],
            _ => [None, None],
        };
        observers.into_iter().flatten().filter(|uid| *uid != ROOT).collect()
    }

    /// Returns the directories below the run directory with owner, group and mode. Parents precede their
    /// children.
    fn directories(&self) -> [(&'static str, u32, u32, u32); 22] {
        let Self { pleg, probe, reporter, node_api, watch } = *self;
        [
            ("cri", ROOT, ROOT, FOR_ALL),
            ("cri/admin", ROOT, ROOT, FOR_OWNER),
            ("cri/sync", ROOT, ROOT, FOR_OWNER),
            ("cri/read", ROOT, pleg, FOR_GROUP),
            ("cri/node-api", ROOT, node_api, FOR_GROUP),
            ("cri/probe", ROOT, probe, FOR_GROUP),
            ("podsync", ROOT, watch, FOR_GROUP),
            ("pleg", pleg, watch, FOR_GROUP),
            ("probe", probe, node_api, FOR_GROUP),
            ("status", reporter, node_api, FOR_GROUP),
            ("node-api", node_api, node_api, FOR_OWNER),
            ("subscribe", ROOT, ROOT, FOR_ALL),
            ("subscribe/pleg", pleg, pleg, FOR_ALL),
            ("subscribe/probe", probe, probe, FOR_ALL),
            ("subscribe/podsync", ROOT, ROOT, FOR_ALL),
            ("state", ROOT, ROOT, FOR_OWNER),
            ("keys", ROOT, ROOT, FOR_OWNER),
            (COPIES_DIR, ROOT, ROOT, FOR_ALL),
            ("handed/pleg-service", ROOT, pleg, FOR_GROUP),
            ("handed/probe-service", ROOT, probe, FOR_GROUP),
            ("handed/status-reporter", ROOT, reporter, FOR_GROUP),
            ("handed/node-api", ROOT, node_api, FOR_GROUP),
        ]
    }

    /// Creates the directories of all sockets. An existing directory gets the owner and mode and keeps its
    /// files.
    pub(super) fn prepare(&self, run_dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(run_dir)?;
        let run = Dir::open(run_dir)?;
        for (name, uid, gid, mode) in self.directories() {
            let made = run.make_dir(Path::new(name), Some(Owner { uid, gid }), mode);
            made.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", run_dir.join(name).display())))?;
        }
        Ok(())
    }

    /// Creates the directory of copied drop-ins for each service.
    pub(super) fn prepare_drop_ins(&self, run_dir: &Path, name: &str) -> io::Result<()> {
        let run = Dir::open(run_dir)?;
        for (dir, uid, gid, mode) in self.directories() {
            let dir = Path::new(dir);
            if dir.parent() == Some(Path::new(COPIES_DIR)) {
                run.make_dir(&dir.join(name), Some(Owner { uid, gid }), mode)?;
            }
        }
        Ok(())
    }
}

/// Returns the topmost ancestor of `path`, or `path` itself, that other users cannot enter.
pub(super) fn inaccessible_ancestor(path: &Path) -> Option<PathBuf> {
    let closed = |dir: &&Path| std::fs::metadata(dir).is_ok_and(|m| m.is_dir() && m.mode() & 0o001 == 0);
    path.ancestors().filter(closed).last().map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const USERS: Users = Users { pleg: 11, probe: 12, reporter: 13, node_api: 14, watch: 10 };

    #[test]
    fn a_service_with_uid_0_runs_as_root_and_is_in_no_user_list() {
        let users = Users { pleg: 0, ..USERS };
        assert_eq!(users.user("pleg-service"), None);
        assert_eq!(users.cri_users(true), [("probe", 12), ("node-api", 14)]);
        assert_eq!(USERS.cri_users(false), [("read", 11), ("probe", 12)]);
        assert_eq!(USERS.user("status-reporter"), Some(User { uid: 13, gid: 13, groups: vec![10] }));
        assert_eq!(USERS.user("pod-sync"), None);
    }

    #[test]
    fn a_directory_that_other_users_cannot_enter_is_reported() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let inner = dir.path().join("home/q");
        std::fs::create_dir_all(&inner).unwrap();
        assert_eq!(inaccessible_ancestor(&inner.join("x/y")), None);
        std::fs::set_permissions(dir.path().join("home"), std::fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(inaccessible_ancestor(&inner.join("x/y")), Some(dir.path().join("home")));
    }
}
