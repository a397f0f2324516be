//! Reads the checked-out commit of a git repository without the program `git`, which a build machine may
//! lack.

use std::path::{Path, PathBuf};

/// The checked-out commit, and the files that determine it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Checkout {
    /// 40 hexadecimal digits; `None` without a repository or a commit.
    pub(crate) commit: Option<String>,
    /// Files that change when another commit is checked out or created.
    pub(crate) depends_on: Vec<PathBuf>,
}

/// Finds the commit of the repository whose work tree begins at `root`. Supports linked work trees and packed
/// refs.
#[must_use]
pub(crate) fn find(root: &Path) -> Checkout {
    let Some(git) = git_dir(&root.join(".git")) else { return Checkout::default() };
    let head = git.join("HEAD");
    let Some(text) = read(&head) else { return Checkout::default() };
    let mut depends_on = vec![head];
    let Some(name) = text.strip_prefix("ref: ") else {
        return Checkout { commit: Some(text).filter(|text| is_commit(text)), depends_on };
    };
    // A linked work tree has its own HEAD and shares the refs.
    let shared = read(&git.join("commondir")).map_or_else(|| git.clone(), |dir| git.join(dir));
    let (loose, packed) = (shared.join(name), shared.join("packed-refs"));
    let in_packed = |text: String| {
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.filter(|(_, reference)| *reference == name).map(|(commit, _)| commit.to_owned()).next()
    };
    let commit = read(&loose).or_else(|| read(&packed).and_then(in_packed));
    // A packed ref becomes a file with the next commit. A dependency on a file that does not exist would
    // repeat every build.
    let watched = loose.ancestors().find(|path| path.exists()).map(Path::to_owned);
    depends_on.extend(watched.into_iter().chain(Some(packed).filter(|path| path.exists())));
    Checkout { commit: commit.filter(|text| is_commit(text)), depends_on }
}

/// Returns the directory of the repository: `.git` itself, or the one that a linked work tree names in it.
fn git_dir(dot_git: &Path) -> Option<PathBuf> {
    if dot_git.is_dir() {
        return Some(dot_git.to_owned());
    }
    let named = PathBuf::from(read(dot_git)?.strip_prefix("gitdir: ")?);
    Some(dot_git.parent()?.join(named))
}

fn read(path: &Path) -> Option<String> {
    Some(std::fs::read_to_string(path).ok()?.trim_end().to_owned())
}

fn is_commit(text: &str) -> bool {
    text.len() >= 40 && text.bytes().all(|b| b.is_ascii_hexdigit())
}
