//! The lines of `/etc/projects` and `/etc/projid`: directories and names of project IDs
//! (`pkg/volume/util/fsquota: projectsList`).
//!
//! Lines of other programs and lines that cannot be parsed are kept.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Smallest project ID that is assigned, as in the kubelet.
pub(super) const FIRST_ID: u32 = 1_048_577;
/// Project IDs that are tried before an assignment fails.
const MAX_TRIES: usize = 129;

/// Both files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Projects {
    /// `ID:DIRECTORY`
    directories: Vec<String>,
    /// `NAME:ID`
    names: Vec<String>,
}

impl Projects {
    pub(super) fn parse(directories: &str, names: &str) -> Self {
        let lines = |text: &str| text.lines().map(str::to_owned).collect();
        Self { directories: lines(directories), names: lines(names) }
    }

    /// Returns the texts of `/etc/projects` and `/etc/projid`.
    pub(super) fn texts(&self) -> [String; 2] {
        let text = |lines: &[String]| lines.iter().map(|line| format!("{line}\n")).collect();
        [text(&self.directories), text(&self.names)]
    }

    /// Returns the project of a directory.
    pub(super) fn id_of(&self, dir: &Path) -> Option<u32> {
        self.directories.iter().filter_map(|line| directory(line)).find(|(_, d)| *d == dir).map(|(id, _)| id)
    }

    /// Assigns a project to a directory that has none: the first ID that is neither listed nor `is_used` on
    /// the file system. Returns `None` if there is none within the number of tries.
    pub(super) fn assign(&mut self, dir: &Path, mut is_used: impl FnMut(u32) -> bool) -> Option<u32> {
        let of_directories = self.directories.iter().filter_map(|line| directory(line)).map(|(id, _)| id);
        let of_names = self.names.iter().filter_map(|line| name(line)).map(|(_, id)| id);
        let listed: BTreeSet<u32> = of_directories.chain(of_names).collect();
        let id = (FIRST_ID..=u32::MAX)
            .filter(|id| !listed.contains(id))
            .take(MAX_TRIES)
            .find(|id| !is_used(*id))?;
        self.directories.push(format!("{id}:{}", dir.display()));
        self.names.push(format!("{}:{id}", own_name(id)));
        Some(id)
    }

    /// Removes the directories that `is_gone`, and the names of their projects. Returns whether there was
    /// one.
    pub(super) fn remove(&mut self, is_gone: impl Fn(&Path) -> bool) -> bool {
        let before = self.directories.len();
        let mut removed = BTreeSet::new();
        self.directories.retain(|line| match directory(line) {
            Some((id, dir)) if is_gone(&dir) => {
                removed.insert(id);
                false
            }
            Some(_) | None => true,
        });
        for line in &self.directories {
            if let Some((id, _)) = directory(line) {
                removed.remove(&id);
            }
        }
        self.names.retain(|line| {
            !name(line).is_some_and(|(name, id)| removed.contains(&id) && name == own_name(id))
        });
        self.directories.len() != before
    }
}

fn own_name(id: u32) -> String {
    format!("volume{id}")
}

fn directory(line: &str) -> Option<(u32, PathBuf)> {
    let (id, dir) = line.split_once(':')?;
    Some((id.parse().ok()?, PathBuf::from(dir)))
}

fn name(line: &str) -> Option<(&str, u32)> {
    let (name, id) = line.split_once(':').filter(|_| !line.starts_with('#'))?;
    Some((name, id.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OTHERS: (&str, &str) =
        ("# comment\n42:/srv/a\n1048578:/srv/b\nbroken\n", "# a:1048577\nown:42\nten:1048579\n");

    #[test]
    fn a_directory_gets_the_first_id_that_is_neither_listed_nor_used() {
        let mut projects = Projects::parse(OTHERS.0, OTHERS.1);
        let dir = Path::new("/var/lib/kubelet/pods/u/volumes/kubernetes.io~empty-dir/v");
        assert_eq!(projects.id_of(dir), None);
        // 1048577 is used on the file system, 1048578 has a directory, 1048579 a name.
        assert_eq!(projects.assign(dir, |id| id == FIRST_ID), Some(1_048_580));
        assert_eq!(projects.id_of(dir), Some(1_048_580));
        let [directories, names] = projects.texts();
        assert_eq!(directories, format!("{}1048580:{}\n", OTHERS.0, dir.display()));
        assert_eq!(names, format!("{}volume1048580:1048580\n", OTHERS.1));
        assert_eq!(projects.assign(Path::new("/x"), |_| false), Some(FIRST_ID));
    }

    #[test]
    fn an_assignment_gives_up_where_all_ids_are_used() {
        let mut projects = Projects::parse(OTHERS.0, OTHERS.1);
        let mut tried = 0;
        let used = |_| {
            tried += 1;
            true
        };
        assert_eq!(projects.assign(Path::new("/x"), used), None);
        assert_eq!((tried, projects), (MAX_TRIES, Projects::parse(OTHERS.0, OTHERS.1)));
    }

    #[test]
    fn removing_a_directory_leaves_the_lines_of_others() {
        let mut projects = Projects::parse(OTHERS.0, OTHERS.1);
        for dir in ["/pods/u1/a", "/pods/u1/b", "/pods/u2/a"] {
            assert!(projects.assign(Path::new(dir), |_| false).is_some());
        }
        assert!(!projects.remove(|dir| dir.starts_with("/pods/u")), "a path is compared by its components");
        assert!(projects.remove(|dir| dir.starts_with("/pods/u1")));
        let [directories, names] = projects.texts();
        assert_eq!(directories, format!("{}1048581:/pods/u2/a\n", OTHERS.0));
        assert_eq!(names, format!("{}volume1048581:1048581\n", OTHERS.1));
        assert!(
            projects.remove(|dir| dir.starts_with("/pods")) && projects.remove(|dir| dir.starts_with("/srv"))
        );
        let [directories, names] = projects.texts();
        assert_eq!(directories, "# comment\nbroken\n");
        assert_eq!(names, OTHERS.1, "a name that somebody else gave stays");
    }
}
