#include "server/text_file.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "server/descriptor.h"

namespace k3 {
namespace {

absl::Status Failed(const std::string& path, const char* what, int error) {
  const std::string message = absl::StrCat(path, ": cannot be ", what, ": ", std::generic_category().message(error));
  return error == ENOENT ? absl::NotFoundError(message) : absl::InvalidArgumentError(message);
}

}  // namespace

absl::StatusOr<std::string> ReadTextFile(const std::string& path) {
  // Opening a pipe that nobody writes to would wait for ever.
  const Descriptor file(open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0) return Failed(path, "opened", errno);
  struct stat status {};
  if (fstat(file.get(), &status) != 0) return Failed(path, "opened", errno);
  if (S_ISDIR(status.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected a file, found a directory"));
  }
  std::string text;
  char buffer[1 << 16];
  while (true) {
    const ssize_t size = read(file.get(), buffer, sizeof(buffer));
    if (size > 0) {
      text.append(buffer, static_cast<size_t>(size));
    } else if (size == 0) {
      return text;
    } else if (errno == EAGAIN) {
      pollfd entry{file.get(), POLLIN, 0};
      poll(&entry, 1, -1);
    } else if (errno != EINTR) {
      return Failed(path, "read", errno);
    }
  }
}

absl::StatusOr<std::string> WriteTemporaryText(const std::string& prefix, const std::string& suffix,
                                               const std::string& text) {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::temp_directory_path(error);
  if (error) return absl::InternalError(absl::StrCat("no folder for temporary files: ", error.message()));
  std::string path = (folder / (prefix + "XXXXXX" + suffix)).string();
  const Descriptor file(mkostemps(path.data(), static_cast<int>(suffix.size()), O_CLOEXEC));
  const auto failed = [&](int code) {
    return absl::InternalError(absl::StrCat(path, ": cannot be written: ", std::generic_category().message(code)));
  };
  if (file.get() < 0) return failed(errno);
  for (size_t done = 0; done < text.size();) {
    const ssize_t size = write(file.get(), text.data() + done, text.size() - done);
    if (size >= 0) {
      done += static_cast<size_t>(size);
    } else if (errno != EINTR) {
      return failed(errno);
    }
  }
  return path;
}

}  // namespace k3
