//! `net.ipv4.ip_forward`: the bridge plugin enables it for pods and never disables it. The last instance
//! restores its value.
//!
//! For each network namespace, a file beside the lock files has the original value and the indices of the
//! instances that need forwarding. The index of a killed owner stays in it until that instance is removed.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{self, Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use nix::fcntl::{Flock, FlockArg};
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::cni::Names;

const SYSCTL: &str = "/proc/sys/net/ipv4/ip_forward";

/// Prefix of the file names, followed by the number of the network namespace.
const PREFIX: &str = "ip_forward.";

/// Records that this index needs forwarding, before anything enables it.
///
/// # Errors
/// Fails if the file cannot be written.
pub(crate) fn hold(lock_dir: &Path, index: u8) -> Result<(), Error> {
    let here = Here::find().map_err(Error::file("read", SYSCTL))?;
    here.hold(lock_dir, index).map_err(Error::file("write", here.note(lock_dir)))
}

/// Removes an index from all files. The last one restores the original value.
pub(crate) fn give_back(lock_dir: &Path, index: u8) {
    let Ok(here) = Here::find() else { return };
    let Ok(entries) = std::fs::read_dir(lock_dir) else { return };
    for entry in entries.filter_map(Result::ok) {
        if entry.file_name().to_string_lossy().starts_with(PREFIX)
            && let Err(error) = here.give_back(&entry.path(), index)
        {
            tracing::warn!(note = %entry.path().display(), %error, "ip_forward not restored");
        }
    }
}

/// The network namespace of this process.
struct Here {
    /// Inode of the namespace.
    namespace: u64,
    sysctl: PathBuf,
    bridges: BTreeSet<String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
struct Note {
    before: String,
    /// Bridges that existed before. A later bridge found forwarding enabled and relies on it.
    bridges: BTreeSet<String>,
    users: BTreeSet<u8>,
}

impl Here {
    fn find() -> io::Result<Self> {
        let links = std::fs::read_dir("/sys/class/net").into_iter().flatten().filter_map(Result::ok);
        let bridges = links.filter(|link| link.path().join("bridge").exists());
        Ok(Self {
            namespace: std::fs::metadata("/proc/thread-self/ns/net")?.ino(),
            sysctl: PathBuf::from(SYSCTL),
            bridges: bridges
                .filter_map(|link| link.file_name().into_string().ok())
                .filter(|name| !Names::is_bridge(name))
                .collect(),
        })
    }

    fn note(&self, lock_dir: &Path) -> PathBuf {
        lock_dir.join(format!("{PREFIX}{}", self.namespace))
    }

    fn value(&self) -> io::Result<String> {
        Ok(std::fs::read_to_string(&self.sysctl)?.trim().to_owned())
    }

    fn hold(&self, lock_dir: &Path, index: u8) -> io::Result<()> {
        let mut file = lock(&self.note(lock_dir), true)?;
        let mut note = match read(&mut file)? {
            Some(note) => note,
            None => Note { before: self.value()?, bridges: self.bridges.clone(), ..Note::default() },
        };
        note.users.insert(index);
        write(&mut file, &note)
    }

    fn give_back(&self, path: &Path, index: u8) -> io::Result<()> {
        let mut file = match lock(path, false) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            locked => locked?,
        };
        let Some(mut note) = read(&mut file)? else { return Ok(()) };
        if !note.users.remove(&index) {
            return Ok(());
        }
        if !note.users.is_empty() {
            return write(&mut file, &note);
        }
        // Another namespace cannot be reached from here, and usually no longer exists.
        if path.file_name() == self.note(Path::new("")).file_name() {
            self.restore(&note)?;
        }
        // Removed while locked: a waiter detects that the path no longer leads to the file that it locked.
        std::fs::remove_file(path)
    }

    fn restore(&self, note: &Note) -> io::Result<()> {
        if self.value()? == note.before {
            return Ok(());
        }
        if let Some(bridge) = self.bridges.difference(&note.bridges).next() {
            tracing::info!(bridge, "ip_forward left enabled for a later bridge");
            return Ok(());
        }
        std::fs::write(&self.sysctl, &note.before)
    }
}

/// Opens and locks a file.
fn lock(path: &Path, create: bool) -> io::Result<Flock<File>> {
    loop {
        let file = OpenOptions::new().read(true).write(true).create(create).truncate(false).open(path)?;
        let file = Flock::lock(file, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
        let locked = file.metadata()?.ino();
        if std::fs::metadata(path).map(|m| m.ino()).ok() == Some(locked) {
            return Ok(file);
        }
    }
}

/// Returns `None` for a new file, or one whose writer was killed before it enabled forwarding.
fn read(file: &mut File) -> io::Result<Option<Note>> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(serde_json::from_str(&text).ok())
}

fn write(file: &mut File, note: &Note) -> io::Result<()> {
    let text = serde_json::to_string(note)?;
    file.set_len(0)?;
    file.rewind()?;
    file.write_all(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Machine {
        dir: tempfile::TempDir,
        here: Here,
    }

    impl Machine {
        fn new(value: &str) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let sysctl = dir.path().join("sysctl");
            std::fs::write(&sysctl, format!("{value}\n")).unwrap();
            Self { here: Here { namespace: 7, sysctl, bridges: BTreeSet::new() }, dir }
        }

        /// Enables forwarding like the bridge plugin.
        fn hold(&self, index: u8) {
            self.here.hold(self.dir.path(), index).unwrap();
            std::fs::write(&self.here.sysctl, "1").unwrap();
        }

        fn give_back(&self, index: u8) -> String {
            self.here.give_back(&self.here.note(self.dir.path()), index).unwrap();
            self.here.value().unwrap()
        }
    }

    #[test]
    fn the_last_instance_restores_the_setting_that_the_first_one_found() {
        let machine = Machine::new("0");
        machine.hold(1);
        machine.hold(2);
        assert_eq!(machine.give_back(1), "1", "the second still needs it");
        assert_eq!(machine.give_back(1), "1", "an index is given back once");
        machine.hold(3);
        assert_eq!(machine.give_back(2), "1");
        assert_eq!(machine.give_back(3), "0");
        assert!(!machine.here.note(machine.dir.path()).exists());
        machine.hold(4);
        assert_eq!(machine.give_back(4), "0", "and again");
    }

    #[test]
    fn a_setting_that_was_on_before_stays_on() {
        let machine = Machine::new("1");
        machine.hold(1);
        assert_eq!(machine.give_back(1), "1");
    }

    #[test]
    fn a_bridge_created_meanwhile_keeps_forwarding_on_and_an_earlier_one_does_not() {
        for (before, after, want) in [(&[][..], &["docker0"][..], "1"), (&["br0"], &["br0"], "0")] {
            let mut machine = Machine::new("0");
            let names = |list: &[&str]| list.iter().map(|n| (*n).to_owned()).collect();
            machine.here.bridges = names(before);
            machine.hold(1);
            machine.here.bridges = names(after);
            assert_eq!(machine.give_back(1), want, "{after:?}");
        }
    }

    #[test]
    fn another_namespace_is_not_touched() {
        let machine = Machine::new("0");
        machine.hold(1);
        let other = Here { namespace: 8, sysctl: machine.here.sysctl.clone(), bridges: BTreeSet::new() };
        other.give_back(&machine.here.note(machine.dir.path()), 1).unwrap();
        assert_eq!(machine.here.value().unwrap(), "1");
        assert!(!machine.here.note(machine.dir.path()).exists(), "the note is no longer needed");
    }
}
