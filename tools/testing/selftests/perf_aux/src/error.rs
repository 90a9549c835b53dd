// SPDX-License-Identifier: GPL-2.0

//! What was attempted, and the errno that came back.

use std::fmt;
use std::io;

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A failed operation: a sentence about the attempt, and the errno if a system call refused it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    what: String,
    errno: Option<i32>,
}

impl Error {
    /// An error that no system call reported.
    pub fn new(what: impl Into<String>) -> Self {
        Error {
            what: what.into(),
            errno: None,
        }
    }

    /// The error that the system call just made left in errno.
    pub fn last_os(what: impl Into<String>) -> Self {
        Self::from_io(what, &io::Error::last_os_error())
    }

    /// The error of a failed library call.
    pub fn from_io(what: impl Into<String>, error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(errno) => Error {
                what: what.into(),
                errno: Some(errno),
            },
            None => Error::new(format!("{}: {error}", what.into())),
        }
    }

    /// The errno, where a system call gave one.
    pub fn errno(&self) -> Option<i32> {
        self.errno
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.errno {
            Some(errno) => write!(f, "{}: {}", self.what, errno_name(errno)),
            None => f.write_str(&self.what),
        }
    }
}

impl std::error::Error for Error {}

/// The symbolic name of an errno, as manual pages write it.
pub fn errno_name(errno: i32) -> String {
    let name = match errno {
        libc::EPERM => "EPERM",
        libc::ENOENT => "ENOENT",
        libc::ESRCH => "ESRCH",
        libc::EINTR => "EINTR",
        libc::EIO => "EIO",
        libc::E2BIG => "E2BIG",
        libc::EBADF => "EBADF",
        libc::ECHILD => "ECHILD",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EACCES => "EACCES",
        libc::EFAULT => "EFAULT",
        libc::EBUSY => "EBUSY",
        libc::EEXIST => "EEXIST",
        libc::ENODEV => "ENODEV",
        libc::EINVAL => "EINVAL",
        libc::EMFILE => "EMFILE",
        libc::ENOSPC => "ENOSPC",
        libc::EROFS => "EROFS",
        libc::ENOSYS => "ENOSYS",
        libc::EOPNOTSUPP => "EOPNOTSUPP",
        libc::EOVERFLOW => "EOVERFLOW",
        libc::ETIMEDOUT => "ETIMEDOUT",
        _ => return format!("errno {errno}"),
    };
    name.to_owned()
}
