//! Which user each service runs as, and who may enter the directory of each socket. The table in ARCHITECTURE.md says the same.

use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use quintlet_kit::atomic_file::Owner;
use quintlet_kit::beneath::Dir;

use super::UpArgs;
use super::plan::{NODE_API, POD_SYNC};
use crate::run_as::User;

/// The users of the services that need no root.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Users {
    pleg: u32,
    probe: u32,
    reporter: u32,
    node_api: u32,
    /// Group of those that watch the health of other services.
    watch: u32,
}

/// Root's uid and gid.
const ROOT: u32 = 0;
/// The directory can be entered by its owner and its group, and what is made in it takes the group.
const FOR_GROUP: u32 = 0o2750;
const FOR_OWNER: u32 = 0o700;
const FOR_ALL: u32 = 0o755;

/// Where copies of files lie that the services may not read themselves.
pub(super) const HANDED: &str = "handed";

impl Users {
    /// The users that the options name.
    pub(super) fn of(args: &UpArgs) -> Self {
        Self {
            pleg: args.pleg_uid,
            probe: args.probe_uid,
            reporter: args.reporter_uid,
            node_api: args.node_api_uid,
            watch: args.watch_gid,
        }
    }

    /// The user of a service.
    pub(super) fn uid(&self, service: &str) -> u32 {
        match service {
            "pleg-service" => self.pleg,
            "probe-service" => self.probe,
            "status-reporter" => self.reporter,
            NODE_API => self.node_api,
            _ => ROOT,
        }
    }

    /// As whom a service is run; none: as root.
    pub(super) fn user(&self, service: &str) -> Option<User> {
        let uid = self.uid(service);
        let watches = ["status-reporter", NODE_API].contains(&service);
        let groups = if watches { vec![self.watch] } else { Vec::new() };
        (uid != ROOT).then_some(User { uid, gid: uid, groups })
    }

    /// Users that may connect to a socket of cri-proxy, each with the socket.
    pub(super) fn of_cri(&self, node_api: bool) -> Vec<(&'static str, u32)> {
        let all = [("read", self.pleg), ("probe", self.probe), ("node-api", self.node_api)];
        all.into_iter().filter(|(socket, uid)| *uid != ROOT && (node_api || *socket != NODE_API)).collect()
    }

    /// Users that may ask a service for its health and metrics, and nothing else.
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

    /// The directories below the run directory, parents first, each with its owner, group and mode.
    fn directories(&self) -> [(&'static str, u32, u32, u32); 18] {
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
            ("state", ROOT, ROOT, FOR_OWNER),
            ("keys", ROOT, ROOT, FOR_OWNER),
            (HANDED, ROOT, ROOT, FOR_ALL),
            ("handed/pleg-service", ROOT, pleg, FOR_GROUP),
            ("handed/probe-service", ROOT, probe, FOR_GROUP),
            ("handed/status-reporter", ROOT, reporter, FOR_GROUP),
            ("handed/node-api", ROOT, node_api, FOR_GROUP),
        ]
    }

    /// Makes the directories of all sockets. A directory that is there gets its owner and mode and keeps its files.
    ///
    /// # Errors
    /// One cannot be made or given away.
    pub(super) fn prepare(&self, run_dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(run_dir)?;
        let run = Dir::open(run_dir)?;
        for (name, uid, gid, mode) in self.directories() {
            let made = run.make_dir(Path::new(name), Some(Owner { uid, gid }), mode);
            made.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", run_dir.join(name).display())))?;
        }
        Ok(())
    }

    /// Makes the directories of copied drop-ins beside the other copies.
    ///
    /// # Errors
    /// One cannot be made or given away.
    pub(super) fn prepare_drop_ins(&self, run_dir: &Path, name: &str) -> io::Result<()> {
        let run = Dir::open(run_dir)?;
        for (dir, uid, gid, mode) in self.directories() {
            let dir = Path::new(dir);
            if dir.parent() == Some(Path::new(HANDED)) {
                run.make_dir(&dir.join(name), Some(Owner { uid, gid }), mode)?;
            }
        }
        Ok(())
    }
}

/// Finds a directory on the way to `path` that users other than its owner cannot enter.
pub(super) fn closed_on_the_way(path: &Path) -> Option<PathBuf> {
    let closed = |dir: &&Path| std::fs::metadata(dir).is_ok_and(|m| m.is_dir() && m.mode() & 0o001 == 0);
    path.ancestors().filter(closed).last().map(Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    const USERS: Users = Users { pleg: 11, probe: 12, reporter: 13, node_api: 14, watch: 10 };

    #[test]
    fn a_service_that_is_given_uid_0_runs_as_root_and_is_on_no_list() {
        let users = Users { pleg: 0, ..USERS };
        assert_eq!(users.user("pleg-service"), None);
        assert_eq!(users.of_cri(true), [("probe", 12), ("node-api", 14)]);
        assert_eq!(USERS.of_cri(false), [("read", 11), ("probe", 12)]);
        assert_eq!(USERS.user("status-reporter"), Some(User { uid: 13, gid: 13, groups: vec![10] }));
        assert_eq!(USERS.user("pod-sync"), None);
    }

    #[test]
    fn a_directory_that_others_cannot_enter_is_named() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let inner = dir.path().join("home/q");
        std::fs::create_dir_all(&inner).unwrap();
        assert_eq!(closed_on_the_way(&inner.join("x/y")), None);
        std::fs::set_permissions(dir.path().join("home"), std::fs::Permissions::from_mode(0o700)).unwrap();
        assert_eq!(closed_on_the_way(&inner.join("x/y")), Some(dir.path().join("home")));
    }
}
