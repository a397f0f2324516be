//! `quintctl run-as`: changes the user and executes a program. `quintctl up` starts services with it.
//!
//! `run-as UID GID GROUPS NAME PROGRAM [ARGUMENT]...`, where GROUPS is a comma-separated list of group IDs,
//! or `-` for none, and NAME is the name that the program is run by. The program has no capabilities and
//! cannot gain any (`no_new_privs`).

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::Command;

use nix::unistd::{Gid, Uid, setgid, setgroups, setuid};

/// The first argument that selects this mode.
pub(crate) const NAME: &str = "run-as";

/// The GROUPS argument for no supplementary groups.
const NONE: &str = "-";

/// A user that a service runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Supplementary groups.
    pub(crate) groups: Vec<u32>,
}

impl User {
    /// Returns the arguments of `quintctl` that execute `program` by the name `name` as this user. The
    /// program's own arguments follow them.
    pub(crate) fn line(&self, name: &OsStr, program: &OsStr) -> Vec<OsString> {
        let groups: Vec<String> = self.groups.iter().map(u32::to_string).collect();
        let groups = if groups.is_empty() { NONE.to_owned() } else { groups.join(",") };
        vec![
            NAME.into(),
            self.uid.to_string().into(),
            self.gid.to_string().into(),
            groups.into(),
            name.to_owned(),
            program.to_owned(),
        ]
    }
}

/// Executes the arguments after [`NAME`]. Returns only if that failed.
pub(crate) fn run(words: &[OsString]) -> io::Error {
    let become_user = |user: &User| -> io::Result<()> {
        let groups: Vec<Gid> = user.groups.iter().copied().map(Gid::from_raw).collect();
        setgroups(&groups)?;
        setgid(Gid::from_raw(user.gid))?;
        setuid(Uid::from_raw(user.uid))?;
        Ok(nix::sys::prctl::set_no_new_privs()?)
    };
    let parsed = parse(words);
    match parsed.and_then(|(user, name, program, rest)| become_user(&user).map(|()| (name, program, rest))) {
        Ok((name, program, arguments)) => {
            let error = Command::new(program).arg0(name).args(arguments).exec();
            io::Error::new(error.kind(), format!("{}: {error}", program.display()))
        }
        Err(error) => error,
    }
}

fn parse(words: &[OsString]) -> io::Result<(User, &OsStr, &OsStr, &[OsString])> {
    let [uid, gid, groups, name, program, arguments @ ..] = words else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "expected UID GID GROUPS NAME PROGRAM [ARGUMENT]...",
        ));
    };
    let groups = match groups.to_str() {
        Some(NONE) => Vec::new(),
        _ => groups.to_string_lossy().split(',').map(|g| id(OsStr::new(g))).collect::<io::Result<_>>()?,
    };
    Ok((User { uid: id(uid)?, gid: id(gid)?, groups }, name.as_os_str(), program.as_os_str(), arguments))
}

fn id(word: &OsStr) -> io::Result<u32> {
    let invalid = || {
        io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("invalid user or group ID {:?}", word.display().to_string()),
        )
    };
    word.to_str().and_then(|w| w.parse().ok()).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_names_user_groups_and_program_in_order() {
        let user = User { uid: 1, gid: 2, groups: vec![3, 4] };
        assert_eq!(
            user.line(OsStr::new("x"), OsStr::new("/bin/x")),
            ["run-as", "1", "2", "3,4", "x", "/bin/x"]
        );
        let alone = User { groups: Vec::new(), ..user };
        assert_eq!(
            alone.line(OsStr::new("x"), OsStr::new("/bin/x")),
            ["run-as", "1", "2", "-", "x", "/bin/x"]
        );
    }

    #[test]
    fn a_user_round_trips_through_the_command_line_and_an_invalid_one_runs_nothing() {
        let user = User { uid: 1, gid: 2, groups: vec![3, 4] };
        let line = [user.line(OsStr::new("x"), OsStr::new("/bin/x")), vec!["-v".into()]].concat();
        let (read, name, program, rest) = parse(&line[1..]).unwrap();
        assert_eq!((read, name, program), (user, OsStr::new("x"), OsStr::new("/bin/x")));
        assert_eq!(rest, ["-v"]);
        for words in [
            &["1", "2", "-", "x"][..],
            &["x", "2", "-", "x", "/bin/x"],
            &["1", "2", "", "x", "/bin/x"],
            &["1", "-1", "-", "x", "/bin/x"],
        ] {
            let words: Vec<OsString> = words.iter().map(Into::into).collect();
            assert_eq!(parse(&words).unwrap_err().kind(), io::ErrorKind::InvalidInput, "{words:?}");
        }
    }
}
