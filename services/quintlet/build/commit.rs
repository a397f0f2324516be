//! Reads which commit of a git repository is checked out. Without the program `git`: a build machine may lack it.

use std::path::{Path, PathBuf};

/// The commit that is checked out, and the files that say so.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Found {
    /// 40 hexadecimal digits; `None` where there is no repository, or no commit in it.
    pub(crate) commit: Option<String>,
    /// What changes when another commit is checked out or made.
    pub(crate) depends_on: Vec<PathBuf>,
}

/// Finds the commit of the repository whose work tree begins at `root`. Knows linked work trees and packed refs.
#[must_use]
pub(crate) fn find(root: &Path) -> Found {
    let Some(git) = git_dir(&root.join(".git")) else { return Found::default() };
    let head = git.join("HEAD");
    let Some(text) = read(&head) else { return Found::default() };
    let mut depends_on = vec![head];
    let Some(name) = text.strip_prefix("ref: ") else {
        return Found { commit: Some(text).filter(|text| is_commit(text)), depends_on };
    };
    // A linked work tree has its own HEAD and shares the refs.
    let shared = read(&git.join("commondir")).map_or_else(|| git.clone(), |dir| git.join(dir));
    let (loose, packed) = (shared.join(name), shared.join("packed-refs"));
    let in_packed = |text: String| {
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        lines.filter(|(_, of)| *of == name).map(|(commit, _)| commit.to_owned()).next()
    };
    let commit = read(&loose).or_else(|| read(&packed).and_then(in_packed));
    // A ref that is packed becomes a file with the next commit. A file that does not exist would make every build run anew.
    let watched = loose.ancestors().find(|path| path.exists()).map(Path::to_owned);
    depends_on.extend(watched.into_iter().chain(Some(packed).filter(|path| path.exists())));
    Found { commit: commit.filter(|text| is_commit(text)), depends_on }
}

/// The directory of the repository: `.git` itself, or the one that a linked work tree names in it.
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
